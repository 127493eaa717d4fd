"""Parameters and multiply-adds of an ONNX model, counted from its graph.

Counted as frameworks do: a convolution's and a linear layer's weights and biases, a normalisation's scale and shift,
not its running statistics. Folded means that each normalisation has gone into its convolution, of which its shift is
left. Multiply-adds are those of convolutions and linear layers alone. No file or clock here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import shape_inference

_WITH_WEIGHTS: Final = ("Conv", "Gemm")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a model is made of.

    Attributes:
        parameters: trained numbers, normalisations included.
        folded_parameters: the same with normalisations folded into the layers before them.
        multiply_adds: of one input of the batch.
    """

    parameters: int
    folded_parameters: int
    multiply_adds: int


def count(model: onnx.ModelProto) -> Counts:
    """The counts of a model whose input shape is fixed but for the batch.

    Raises:
        ValueError: a layer whose output shape cannot be inferred.
    """
    sizes = {weight.name: tuple(weight.dims) for weight in model.graph.initializer}
    outputs = _output_shapes(model)
    parameters = folded = multiply_adds = 0
    for node in model.graph.node:
        if node.op_type in _WITH_WEIGHTS:
            own = [math.prod(sizes[name]) for name in node.input[1:]]
            parameters += sum(own)
            folded += sum(own)
            multiply_adds += _multiply_adds(sizes[node.input[1]], outputs[node.output[0]])
        elif node.op_type == "BatchNormalization":
            channels = math.prod(sizes[node.input[1]])
            parameters += 2 * channels
            folded += channels
    return Counts(parameters, folded, multiply_adds)


def _multiply_adds(weight: tuple[int, ...], output: tuple[int, ...]) -> int:
    """Each element of a layer's output is one sum of products over a row of its weight: ``[features, ...]``."""
    return math.prod(output) * math.prod(weight[1:])


def _output_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Inferred shapes by tensor for a batch of one, without the batch dimension."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for end in (*fixed.graph.input, *fixed.graph.output):
        end.type.tensor_type.shape.dim[0].dim_value = 1
    inferred = shape_inference.infer_shapes(fixed, strict_mode=True, data_prop=True)
    shapes = {}
    for value in inferred.graph.value_info:
        dims = value.type.tensor_type.shape.dim
        if dims and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims[1:])
    missing = [n.output[0] for n in model.graph.node if n.op_type in _WITH_WEIGHTS and n.output[0] not in shapes]
    if missing:
        raise ValueError(f"the shapes of {', '.join(missing)} cannot be inferred")
    return shapes
