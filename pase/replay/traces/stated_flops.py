"""FLOPs of PyTorch's convolutions and attention, from the operands that Kineto records of an op.

A convolution's result depends on its stride and padding, and causal attention computes half of the scores. Both are
plain numbers among the op's arguments ("Concrete Inputs"), beside the dims of its tensors. A multiply-add counts as
two. The places of arguments are those of PyTorch's schemas (aten/src/ATen/native/native_functions.yaml).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

from pase.files.json_values import Json
from pase.replay.types import Shapes

__all__ = ["stated_flops"]

_CONVOLUTIONS = {
    "aten::convolution": (3, 4, 5, 6),
    "aten::_convolution": (3, 4, 5, 6),
    "aten::convolution_overrideable": (3, 4, 5, 6),
    "aten::cudnn_convolution": (3, 2, 4, -1),
    "aten::miopen_convolution": (4, 3, 5, -1),
    "aten::miopen_depthwise_convolution": (4, 3, 5, -1),
    "aten::mkldnn_convolution": (4, 3, 5, -1),
    "aten::_conv_depthwise2d": (4, 5, 6, -1),
}
"""Op → the places of stride, padding, dilation, and of whether it is transposed (−1: it never is)."""
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": (0, 2, 4),
    "aten::_flash_attention_forward": (0, 1, 8),
    "aten::_scaled_dot_product_efficient_attention": (0, 2, 6),
    "aten::_efficient_attention_forward": (0, 1, 9),
    "aten::_scaled_dot_product_cudnn_attention": (0, 2, 6),
    "aten::_cudnn_attention_forward": (0, 2, 9),
    "aiter::fmha_v3_fwd": (0, 1, 5),
    "aten::_scaled_dot_product_flash_attention_backward": (1, 2, 11),
    "aten::_flash_attention_backward": (1, 1, 11),
    "aten::_efficient_attention_backward": (1, 1, 14),
}
"""Op → the places of its query and of the dim that counts tokens, and of whether it is causal (or the kind of mask)."""


def stated_flops(op: str, operands: Shapes, stated: Sequence[Json]) -> int:
    """Returns the FLOPs of a convolution or of attention; 0 if it is another op, or its arguments do not show them.

    operands: the dims of its tensors; stated: its arguments as text, "" for tensors.

    >>> conv = ["", "", "", "[16, 16]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
    >>> stated_flops("aten::convolution", ((4, 3, 224, 224), (768, 3, 16, 16), *((),) * 7), conv)
    924844032
    """
    rule: Callable[[str, Shapes, Sequence[object]], int] | None = None
    if op in _CONVOLUTIONS:
        rule = _convolution
    elif op == "aten::convolution_backward":
        rule = _convolution_backward
    elif op in _ATTENTION:
        rule = _attention
    if rule is None or len(stated) != len(operands):
        return 0
    return rule(op, operands, [_value(x) for x in stated])


def _value(text: Json) -> object:
    if not isinstance(text, str) or not text or len(text) > 200:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _convolution(op: str, operands: Shapes, stated: Sequence[object]) -> int:
    places = _CONVOLUTIONS[op]
    if len(operands) <= max(places):
        return 0
    image, weight = operands[:2]
    strides, paddings, dilations = (stated[k] for k in places[:3])
    turned = stated[places[3]] if places[3] >= 0 else False
    if len(image) != len(weight) or len(image) < 3 or not isinstance(turned, bool):
        return 0
    if turned:
        return 2 * math.prod(image) * math.prod(weight[1:])
    n = len(image) - 2
    if not (_numbers(strides, n) and _numbers(paddings, n) and _numbers(dilations, n)):
        return 0
    if min(strides) < 1:
        return 0
    places_out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(image[2:], weight[2:], strides, paddings, dilations, strict=True)
    ]
    return max(0, 2 * image[0] * math.prod(places_out) * math.prod(weight)) if min(places_out) > 0 else 0


def _numbers(x: object, n: int) -> TypeGuard[list[int]]:
    return isinstance(x, list) and len(x) == n and all(type(v) is int and v >= 0 for v in x)


def _convolution_backward(op: str, operands: Shapes, stated: Sequence[object]) -> int:
    if len(operands) < 11:
        return 0
    result, image, weight = operands[:3]
    turned, wanted = stated[7], stated[10]
    if not isinstance(turned, bool) or not isinstance(wanted, list) or len(weight) < 3:
        return 0
    return 2 * sum(map(bool, wanted[:2])) * math.prod(image if turned else result) * math.prod(weight[1:])


def _attention(op: str, operands: Shapes, stated: Sequence[object]) -> int:
    first, dim, masked = _ATTENTION[op]
    if len(operands) <= max(first + 2, masked):
        return 0
    q, k, v = operands[first : first + 3]
    causal = stated[masked]
    if not (len(q) == len(k) == len(v) == 4) or causal not in (False, True):
        return 0
    # Forward has the scores and their product with the values; backward the scores again, and two gradients of each.
    pairs = math.prod(q[:3]) * k[dim]
    scores, mixed = (1, 1) if "backward" not in op else (3, 2)
    return 2 * pairs * (scores * q[3] + mixed * v[3]) // (2 if causal else 1)
