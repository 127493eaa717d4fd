"""ResNet-50 as an ONNX graph: bottlenecks of 1x1, 3x3 and 1x1 convolutions with a sum around each.

Architecture: He et al. 2016 (arXiv:1512.03385), table 1; the stride of a stage is in its first 3x3 convolution, as in
the widely used "v1.5", whose parameters number 25,557,032 (torchvision's documentation of resnet50).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx

from b2gmodel.live.onnx_graphs import INPUT, Net

_STAGES: Final = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of each stage."""
_EXPANSION: Final = 4


def resnet50(input_shape: Sequence[int], seed: int, classes: int = 1000) -> onnx.ModelProto:
    """The network for images of ``input_shape``; its output is ``classes`` scores."""
    net = Net("resnet50", input_shape, seed)
    x = net.max_pool(_conv_relu(net, INPUT, 64, 7, 2), 3, 2)
    for width, blocks, stride in _STAGES:
        for number in range(blocks):
            x = _bottleneck(net, x, width, stride if number == 0 else 1)
    pooled = net.add("GlobalAveragePool", [x], net.channels(x))
    return net.model(net.linear(net.add("Flatten", [pooled], net.channels(x)), classes), [classes])


def _bottleneck(net: Net, x: str, width: int, stride: int) -> str:
    inner = _conv_relu(net, _conv_relu(net, x, width, 1), width, 3, stride)
    added = net.norm(net.conv(inner, width * _EXPANSION, 1))
    around = x
    if net.channels(x) != width * _EXPANSION:
        around = net.norm(net.conv(x, width * _EXPANSION, 1, stride))
    total = net.add("Add", [added, around], width * _EXPANSION)
    return net.add("Relu", [total], width * _EXPANSION)


def _conv_relu(net: Net, x: str, channels: int, kernel: int, stride: int = 1) -> str:
    return net.add("Relu", [net.norm(net.conv(x, channels, kernel, stride))], channels)
