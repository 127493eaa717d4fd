"""Runs an ONNX graph of ours with PyTorch, node by node as an eager network does, on a GPU or a CPU.

Runs inside the server's stub process: it may import nothing of this package. Shapes and scales that a graph holds as
constants are bound once, so that no step waits for the device to read one. Only the kinds of nodes that our graphs
have are known here; another is an error at load, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import torch
import torch.nn.functional as fn
from onnx import numpy_helper

Step = Callable[..., Any]
Attributes = Mapping[str, Any]
Fixed = Sequence["npt.NDArray[Any] | None"]
"""A node's inputs that are constants, None where it is computed."""


class TorchGraph:
    """One loaded graph.

    Args:
        file: an ONNX model with one input and one output, the batch first.
        device: ``cpu`` or ``cuda``.
        threads: of the operators on a CPU.

    Raises:
        ValueError: a kind of node that is not known.
    """

    def __init__(self, file: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        graph = onnx.load(file).graph
        fixed = {weight.name: numpy_helper.to_array(weight) for weight in graph.initializer}
        self._device = torch.device(device)
        self._weights = {name: torch.from_numpy(value.copy()).to(self._device) for name, value in fixed.items()}
        self._input, self._output = graph.input[0].name, graph.output[0].name
        last_use = {name: number for number, node in enumerate(graph.node) for name in node.input}
        self._steps = []
        for number, node in enumerate(graph.node):
            if node.op_type not in _KINDS:
                raise ValueError(f"no such kind of node here: {node.op_type}")
            attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            step = _KINDS[node.op_type](attributes, [fixed.get(name) for name in node.input])
            done = [n for n in node.input if last_use[n] == number and n not in fixed and n != self._output]
            self._steps.append((step, tuple(node.input), tuple(node.output), done))

    def __call__(self, batch: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The results of a batch, in memory of the host."""
        with torch.inference_mode():
            values = {self._input: torch.from_numpy(np.ascontiguousarray(batch)).to(self._device)}
            for step, inputs, outputs, done in self._steps:
                # A weight, or else a value; an input that is left out has no name.
                given = (self._weights[n] if n in self._weights else values[n] if n else None for n in inputs)
                found = step(*given)
                values.update(zip(outputs, found if isinstance(found, tuple | list) else (found,), strict=True))
                for name in done:
                    values.pop(name, None)
            result: npt.NDArray[np.float32] = values[self._output].cpu().numpy()
            return result


def _conv(attributes: Attributes, _fixed: Fixed) -> Step:
    stride = tuple(attributes.get("strides", (1, 1)))
    padding = tuple(attributes.get("pads", (0, 0, 0, 0))[:2])
    groups = attributes.get("group", 1)
    return lambda x, weight, bias=None: fn.conv2d(x, weight, bias, stride, padding, groups=groups)


def _norm(attributes: Attributes, _fixed: Fixed) -> Step:
    return lambda x, scale, shift, mean, variance: fn.batch_norm(
        x, mean, variance, scale, shift, eps=attributes["epsilon"]
    )


def _max_pool(attributes: Attributes, _fixed: Fixed) -> Step:
    kernel, stride, padding = attributes["kernel_shape"], attributes["strides"], attributes["pads"][:2]
    return lambda x: fn.max_pool2d(x, tuple(kernel), tuple(stride), tuple(padding))


def _resize(_attributes: Attributes, fixed: Fixed) -> Step:
    scales = _numbers(fixed, 2)[2:]
    return lambda x, _roi, _scales: fn.interpolate(x, scale_factor=scales, mode="nearest")


def _reshape(_attributes: Attributes, fixed: Fixed) -> Step:
    wanted = _numbers(fixed, 1)
    return lambda x, _shape: x.reshape([x.shape[axis] if size == 0 else int(size) for axis, size in enumerate(wanted)])


def _split(attributes: Attributes, fixed: Fixed) -> Step:
    sizes = [int(size) for size in _numbers(fixed, 1)]
    return lambda x, _sizes: torch.split(x, sizes, attributes["axis"])


def _clip(_attributes: Attributes, fixed: Fixed) -> Step:
    low, high = (float(value) for each in fixed[1:3] if each is not None for value in each.reshape(1))
    return lambda x, _low, _high: torch.clamp(x, low, high)


def _top(attributes: Attributes, fixed: Fixed) -> Step:
    count = int(_numbers(fixed, 1)[0])
    return lambda x, _count: tuple(torch.topk(x, count, attributes["axis"]))


def _expand(_attributes: Attributes, fixed: Fixed) -> Step:
    wanted = [int(size) for size in _numbers(fixed, 1)]
    return lambda x, _shape: x.expand(*(max(size, own) for size, own in zip(wanted, x.shape, strict=True)))


def _numbers(fixed: Fixed, place: int) -> list[float]:
    value = fixed[place]
    assert value is not None, "our graphs hold their shapes as constants"
    return [each.item() for each in value]


_KINDS: Final[Mapping[str, Callable[[Attributes, Fixed], Step]]] = {
    "Add": lambda *_: torch.add,
    "ArgMax": lambda a, _: lambda x: torch.argmax(x, a["axis"], keepdim=True),
    "BatchNormalization": _norm,
    "Cast": lambda *_: lambda x: x.to(torch.float32),
    "Clip": _clip,
    "Concat": lambda a, _: lambda *parts: torch.cat(parts, a["axis"]),
    "Conv": _conv,
    "Expand": _expand,
    "Flatten": lambda *_: lambda x: torch.flatten(x, 1),
    "GatherElements": lambda a, _: lambda x, index: torch.gather(x, a["axis"], index),
    "Gemm": lambda *_: fn.linear,
    "GlobalAveragePool": lambda *_: lambda x: x.mean((2, 3), keepdim=True),
    "Identity": lambda *_: lambda x: x,
    "MaxPool": _max_pool,
    "Mul": lambda *_: torch.mul,
    "ReduceMax": lambda a, _: lambda x: torch.amax(x, tuple(a["axes"]), keepdim=True),
    "Relu": lambda *_: torch.relu,
    "Reshape": _reshape,
    "Resize": _resize,
    "Sigmoid": lambda *_: torch.sigmoid,
    "Softmax": lambda a, _: lambda x: torch.softmax(x, a["axis"]),
    "Split": _split,
    "Sub": lambda *_: torch.sub,
    "TopK": _top,
    "Transpose": lambda a, _: lambda x: x.permute(*a["perm"]),
}
