"""MobileNetV2 as an ONNX graph: inverted residuals, each an expansion, a depthwise and a linear convolution.

Architecture: Sandler et al. 2018 (arXiv:1801.04381), table 2, width multiplier 1; 3,504,872 parameters (torchvision's
documentation of mobilenet_v2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx

from b2gmodel.live.onnx_graphs import INPUT, Net

_BLOCKS: Final = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
)  # fmt: skip
"""Expansion, channels, blocks and stride of each row of the table."""


def mobilenetv2(input_shape: Sequence[int], seed: int, classes: int = 1000) -> onnx.ModelProto:
    """The network for images of ``input_shape``; its output is ``classes`` scores."""
    net = Net("mobilenetv2", input_shape, seed)
    x = _conv_relu6(net, INPUT, 32, 3, 2)
    for expansion, channels, blocks, stride in _BLOCKS:
        for number in range(blocks):
            x = _inverted_residual(net, x, expansion, channels, stride if number == 0 else 1)
    x = _conv_relu6(net, x, 1280, 1)
    pooled = net.add("GlobalAveragePool", [x], net.channels(x))
    return net.model(net.linear(net.add("Flatten", [pooled], net.channels(x)), classes), [classes])


def _inverted_residual(net: Net, x: str, expansion: int, channels: int, stride: int) -> str:
    hidden = net.channels(x) * expansion
    inner = x if expansion == 1 else _conv_relu6(net, x, hidden, 1)
    inner = _conv_relu6(net, inner, hidden, 3, stride, groups=hidden)
    added = net.norm(net.conv(inner, channels, 1))
    return net.add("Add", [x, added], channels) if stride == 1 and net.channels(x) == channels else added


def _conv_relu6(net: Net, x: str, channels: int, kernel: int, stride: int = 1, *, groups: int = 1) -> str:
    normal = net.norm(net.conv(x, channels, kernel, stride, groups=groups))
    bounds = [net.constant(np.array(bound, np.float32)) for bound in (0, 6)]
    return net.add("Clip", [normal, *bounds], channels)
