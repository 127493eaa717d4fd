"""YOLOv5s and YOLOv8n as ONNX graphs: the same backbone and neck with two kinds of block, each with its own head.

Architectures: as the two projects describe them in their model files (yolov5s.yaml of version 6 and 7, depth 0.33 and
width 0.5; yolov8.yaml, scale n, depth 0.33 and width 0.25), 80 classes. Published parameters with normalisations
folded: 7,225,885 and 3,151,904; as trained: 7,235,389 and 3,157,200.

The output is the 300 best boxes by class score, each centre, size, score and class; overlapping ones are not
suppressed, which is how a request's answer keeps one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from b2gmodel.live.onnx_graphs import INPUT, Net

DETECTIONS: Final = 300

_CLASSES: Final = 80
_EPSILON: Final = 1e-3
_STRIDES: Final = (8, 16, 32)
_ANCHORS: Final = (  # pixels, three for each stride: those of yolov5s.yaml
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
_BINS: Final = 16
"""Distances that YOLOv8's head tells apart on each side of a box."""

Block = Callable[[Net, str, int, int, bool], str]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What tells the two backbones apart: the first kernel, the block, and whether the neck narrows first."""

    widths: tuple[int, int, int, int, int]
    first_kernel: int
    block: Block
    narrows: bool


def yolov5s(input_shape: Sequence[int], seed: int) -> onnx.ModelProto:
    """The network for images of ``input_shape``, sides of a multiple of 32; output ``[300, 6]``."""
    net = Net("yolov5s", input_shape, seed)
    scales = _backbone_and_neck(net, _Shape((32, 64, 128, 256, 512), 6, _c3, True))
    parts = [
        _anchor_boxes(net, x, input_shape, stride, anchors)
        for x, stride, anchors in zip(scales, _STRIDES, _ANCHORS, strict=True)
    ]
    centre, size, scores = (net.concat(*each) for each in zip(*parts, strict=True))
    return net.model(_best(net, net.concat(centre, size, axis=2), scores), [DETECTIONS, 6])


def yolov8n(input_shape: Sequence[int], seed: int) -> onnx.ModelProto:
    """The network for images of ``input_shape``, sides of a multiple of 32; output ``[300, 6]``."""
    net = Net("yolov8n", input_shape, seed)
    scales = _backbone_and_neck(net, _Shape((16, 32, 64, 128, 256), 3, _c2f, False))
    box_width = max(16, net.channels(scales[0]) // 4, 4 * _BINS)
    score_width = max(net.channels(scales[0]), _CLASSES)
    sides, scores = [], []
    for x in scales:
        sides.append(net.reshape(_tower(net, x, box_width, 4 * _BINS), [0, 4 * _BINS, -1]))
        scores.append(net.reshape(_tower(net, x, score_width, _CLASSES), [0, _CLASSES, -1]))
    boxes = _distance_boxes(net, net.concat(*sides, axis=2), input_shape)
    rows = net.add("Transpose", [net.concat(*scores, axis=2)], perm=[0, 2, 1])
    return net.model(_best(net, boxes, net.add("Sigmoid", [rows])), [DETECTIONS, 6])


# backbone and neck


def _backbone_and_neck(net: Net, shape: _Shape) -> list[str]:
    """Features at strides 8, 16 and 32: down the backbone, up and down again, joined at each scale."""
    widths, block = shape.widths, shape.block
    x = _conv(net, INPUT, widths[0], shape.first_kernel, 2)
    levels = []
    for width, repeats in zip(widths[1:], (1, 2, 3 if shape.narrows else 2, 1), strict=True):
        x = block(net, _conv(net, x, width, 3, 2), width, repeats, True)
        levels.append(x)
    *_, small, middle, _ = levels
    large = _pyramid_pool(net, x, widths[4])

    held_large = _conv(net, large, widths[3], 1) if shape.narrows else large
    x = block(net, net.concat(net.upsample(held_large), middle), widths[3], 1, False)
    held_middle = _conv(net, x, widths[2], 1) if shape.narrows else x
    at_8 = block(net, net.concat(net.upsample(held_middle), small), widths[2], 1, False)
    x = net.concat(_conv(net, at_8, widths[2], 3, 2), held_middle)
    at_16 = block(net, x, widths[3], 1, False)
    x = net.concat(_conv(net, at_16, widths[3], 3, 2), held_large)
    return [at_8, at_16, block(net, x, widths[4], 1, False)]


def _conv(net: Net, x: str, channels: int, kernel: int, stride: int = 1) -> str:
    """Convolution, normalisation and SiLU."""
    normal = net.norm(net.conv(x, channels, kernel, stride), _EPSILON)
    return net.add("Mul", [normal, net.add("Sigmoid", [normal], channels)], channels)


def _bottleneck(net: Net, x: str, kernels: tuple[int, int], adds: bool) -> str:
    channels = net.channels(x)
    inner = _conv(net, _conv(net, x, channels, kernels[0]), channels, kernels[1])
    return net.add("Add", [x, inner], channels) if adds else inner


def _c3(net: Net, x: str, channels: int, repeats: int, adds: bool) -> str:
    """YOLOv5's block: two narrow ways, one through bottlenecks, joined."""
    inner, beside = _conv(net, x, channels // 2, 1), _conv(net, x, channels // 2, 1)
    for _ in range(repeats):
        inner = _bottleneck(net, inner, (1, 3), adds)
    return _conv(net, net.concat(inner, beside), channels, 1)


def _c2f(net: Net, x: str, channels: int, repeats: int, adds: bool) -> str:
    """YOLOv8's block: bottlenecks one after another, and every one's output kept."""
    kept = list(net.halves(_conv(net, x, channels, 1)))
    for _ in range(repeats):
        kept.append(_bottleneck(net, kept[-1], (3, 3), adds))
    return _conv(net, net.concat(*kept), channels, 1)


def _pyramid_pool(net: Net, x: str, channels: int) -> str:
    """Maxima over 5, 9 and 13 elements, as three poolings of 5 in a row."""
    kept = [_conv(net, x, net.channels(x) // 2, 1)]
    for _ in range(3):
        kept.append(net.max_pool(kept[-1], 5))
    return _conv(net, net.concat(*kept), channels, 1)


def _tower(net: Net, x: str, width: int, channels: int) -> str:
    return net.conv(_conv(net, _conv(net, x, width, 3), width, 3), channels, 1, bias=True)


# heads


def _anchor_boxes(
    net: Net, x: str, input_shape: Sequence[int], stride: int, anchors: Sequence[tuple[int, int]]
) -> tuple[str, str, str]:
    """Centre, size and class scores of one scale, ``[batch, boxes, ...]``."""
    values = 5 + _CLASSES
    height, width = (side // stride for side in input_shape[1:])
    raw = net.reshape(net.conv(x, len(anchors) * values, 1, bias=True), [0, len(anchors), values, height * width])
    rows = net.add("Transpose", [raw], perm=[0, 1, 3, 2])
    flat = net.reshape(net.add("Sigmoid", [rows]), [0, -1, values])
    at, side, objectness, classes = net.split(flat, [2, 2, 1, _CLASSES], axis=2)
    grid = np.tile(_grid(height, width), (len(anchors), 1)) - 0.5
    base = np.repeat(np.array(anchors, np.float32), height * width, axis=0)
    centre = _scaled(net, at, 2.0 * stride, grid * stride)
    doubled = net.add("Mul", [side, net.constant(np.array(2, np.float32))])
    squared = net.add("Mul", [doubled, doubled])
    size = net.add("Mul", [squared, net.constant(base)])
    return centre, size, net.add("Mul", [classes, objectness])


def _distance_boxes(net: Net, sides: str, input_shape: Sequence[int]) -> str:
    """Centre and size from the expected distance to each side, ``[batch, boxes, 4]``, in pixels."""
    bins = net.add("Transpose", [net.reshape(sides, [0, 4, _BINS, -1])], perm=[0, 2, 1, 3])
    likely = net.add("Softmax", [bins], _BINS, axis=1)
    distances = net.reshape(net.expectation(likely), [0, 4, -1])
    rows = net.add("Transpose", [distances], perm=[0, 2, 1])
    before, after = net.split(rows, [2, 2], axis=2)
    grids = [_grid(input_shape[1] // stride, input_shape[2] // stride) + 0.5 for stride in _STRIDES]
    strides = np.concatenate([np.full((len(g), 1), s, np.float32) for g, s in zip(grids, _STRIDES, strict=True)])
    scale = net.constant(strides)
    shift = net.add("Mul", [net.add("Sub", [after, before]), net.constant(np.array(0.5, np.float32))])
    centre = net.add("Mul", [net.add("Add", [shift, net.constant(np.concatenate(grids))]), scale])
    size = net.add("Mul", [net.add("Add", [before, after]), scale])
    return net.concat(centre, size, axis=2)


def _best(net: Net, boxes: str, scores: str) -> str:
    """The boxes of the highest class scores, ``[batch, 300, 6]``."""
    score = net.add("ReduceMax", [scores], axes=[2], keepdims=1)
    label = net.add("ArgMax", [scores], axis=2, keepdims=1)
    every = net.concat(boxes, score, net.add("Cast", [label], to=onnx.TensorProto.FLOAT), axis=2)
    best = net.top(score, DETECTIONS)
    return net.add("GatherElements", [every, net.add("Expand", [best, net.constant(np.array([1, 1, 6]))])], axis=1)


def _scaled(net: Net, x: str, factor: float, shift: npt.NDArray[np.float32]) -> str:
    product = net.add("Mul", [x, net.constant(np.array(factor, np.float32))])
    return net.add("Add", [product, net.constant(shift.astype(np.float32))])


def _grid(height: int, width: int) -> npt.NDArray[np.float32]:
    """Column and row of each cell, row by row, shape ``[height * width, 2]``."""
    rows, columns = np.mgrid[:height, :width]
    cells: npt.NDArray[np.float32] = np.stack([columns.ravel(), rows.ravel()], axis=1).astype(np.float32)
    return cells
