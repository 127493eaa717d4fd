"""A builder of ONNX graphs for convolutional networks: layers in, a model with random weights out.

Weights come from one seeded generator in the order in which layers are added, so that a seed gives one model, byte
for byte. They are scaled by fan-in (He et al. 2015, arXiv:1502.01852) and normalisations have near-neutral statistics,
so that activations stay finite through every depth used here. Normalisations are nodes of their own, as in training:
a runtime folds them. The batch dimension is open. Needs the package ``onnx``; no file, clock or network here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from b2gmodel.live.workloads import REAL_OUTPUT_NAME

OPSET: Final = 17
IR_VERSION: Final = 8
INPUT: Final = "input"
OUTPUT: Final = REAL_OUTPUT_NAME
BATCH: Final = "batch"

_GAIN: Final = 2.0


class Net:
    """A graph under construction. Every method adds layers behind ``x``, a tensor's name, and returns their output's.

    Args:
        name: of the graph.
        input_shape: channels, height and width of one input.
        seed: of the weights.
    """

    def __init__(self, name: str, input_shape: Sequence[int], seed: int) -> None:
        self._name = name
        self._input_shape = tuple(input_shape)
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._channels: dict[str, int] = {INPUT: self._input_shape[0]}

    def channels(self, x: str) -> int:
        """Channels of a tensor."""
        return self._channels[x]

    def conv(self, x: str, channels: int, kernel: int, stride: int = 1, *, groups: int = 1, bias: bool = False) -> str:
        """A square convolution, padded so that stride 1 keeps the size and stride 2 halves it."""
        fan_in = self._channels[x] // groups * kernel * kernel
        shape = (channels, self._channels[x] // groups, kernel, kernel)
        inputs = [x, self._weight(self._normal(shape, math.sqrt(_GAIN / fan_in)))]
        if bias:
            inputs.append(self._weight(self._normal((channels,), 0.1)))
        return self.add(
            "Conv",
            inputs,
            channels,
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[(kernel - 1) // 2] * 4,
            group=groups,
        )

    def norm(self, x: str, epsilon: float = 1e-5) -> str:
        """A batch normalisation with statistics as after training: scales near one, shifts and means near zero."""
        shape = (self._channels[x],)
        scale, variance = (1 + self._normal(shape, 0.1) for _ in range(2))
        shift, mean = (self._normal(shape, 0.1) for _ in range(2))
        weights = [self._weight(each) for each in (scale, shift, mean, np.abs(variance))]
        return self.add("BatchNormalization", [x, *weights], self._channels[x], epsilon=epsilon)

    def linear(self, x: str, features: int) -> str:
        """A fully connected layer with bias, on ``[batch, channels]``."""
        weight = self._normal((features, self._channels[x]), math.sqrt(1 / self._channels[x]))
        inputs = [x, self._weight(weight), self._weight(self._normal((features,), 0.1))]
        return self.add("Gemm", inputs, features, transB=1)

    def max_pool(self, x: str, kernel: int, stride: int = 1) -> str:
        """Maximum over a square window, with ``kernel // 2`` of padding."""
        geometry = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return self.add("MaxPool", [x], self._channels[x], **geometry)

    def upsample(self, x: str) -> str:
        """Twice the height and width, by the nearest element."""
        scales = self.constant(np.array([1, 1, 2, 2], np.float32))
        modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return self.add("Resize", [x, "", scales], self._channels[x], **modes)

    def concat(self, *parts: str, axis: int = 1) -> str:
        """Tensors one after another; along channels where no other axis is named."""
        channels = sum(map(self.channels, parts)) if axis == 1 else self._channels[parts[0]]
        return self.add("Concat", list(parts), channels, axis=axis)

    def halves(self, x: str) -> tuple[str, str]:
        """The first and the second half of the channels."""
        first, second = self.split(x, [self._channels[x] // 2] * 2)
        return first, second

    def split(self, x: str, sizes: Sequence[int], axis: int = 1) -> list[str]:
        """Consecutive parts of the given sizes."""
        names = [f"{x}_{number}" for number in range(len(sizes))]
        inputs = [x, self.constant(np.array(sizes, np.int64))]
        self._nodes.append(helper.make_node("Split", inputs, names, axis=axis))
        self._channels |= {
            name: size if axis == 1 else self._channels[x] for name, size in zip(names, sizes, strict=True)
        }
        return names

    def reshape(self, x: str, shape: Sequence[int], channels: int = 0) -> str:
        """Another shape; 0 keeps a dimension, -1 is what is left."""
        return self.add("Reshape", [x, self.constant(np.array(shape, np.int64))], channels)

    def constant(self, value: npt.NDArray[np.generic]) -> str:
        """A tensor that is no parameter: a shape, a grid, a scale."""
        name = f"constant_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(value, name))
        return name

    def expectation(self, x: str) -> str:
        """The mean of 0, 1, ... under a distribution over channels: a fixed convolution, counted as weights."""
        bins = self._channels[x]
        weight = self._weight(np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
        return self.add("Conv", [x, weight], 1, kernel_shape=[1, 1])

    def top(self, x: str, count: int) -> str:
        """Indices of the greatest elements along axis 1."""
        name = f"topk_{len(self._nodes)}"
        inputs = [x, self.constant(np.array([count], np.int64))]
        self._nodes.append(helper.make_node("TopK", inputs, [f"{name}_values", name], axis=1))
        return name

    def add(self, kind: str, inputs: Sequence[str], channels: int = 0, **attributes: Any) -> str:
        """One node of any kind; ``channels`` is its output's second dimension, where a layer with weights follows."""
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        self._channels[name] = channels
        return name

    def model(self, x: str, output_shape: Sequence[int]) -> onnx.ModelProto:
        """The checked model whose output is ``x``, ``output_shape`` for one input."""
        self._nodes.append(helper.make_node("Identity", [x], [OUTPUT]))
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, *shape])
            for name, shape in ((INPUT, self._input_shape), (OUTPUT, output_shape))
        ]
        graph = helper.make_graph(self._nodes, self._name, ends[:1], ends[1:], self._weights)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="b2gmodel",
        )
        onnx.checker.check_model(model)
        return model

    def _normal(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float32]:
        return self._random.standard_normal(shape, np.float32) * np.float32(deviation)

    def _weight(self, value: npt.NDArray[np.float32]) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(value, name))
        return name
