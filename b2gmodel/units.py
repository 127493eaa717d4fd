"""Nanoseconds and seconds: the only place where one becomes the other.

Records hold integer nanoseconds (names end in ``_ns``); models hold float seconds (``_s``).
Durations that a person types carry their unit and are read here, too.
"""

from __future__ import annotations

import math
import re
from typing import Final

from b2gmodel.errors import UsageError

NS_PER_S: Final = 1_000_000_000
KIB: Final = 1024

_DURATION_UNITS_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # the micro sign, and below it the Greek letter that many keyboards give
    "μs": 1_000,
    "ms": 1_000_000,
    "s": NS_PER_S,
    "min": 60 * NS_PER_S,
}
_DURATION: Final = re.compile(
    r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf)\s*([a-zµμ]*)\s*", re.IGNORECASE
)


def s_from_ns(ns: float) -> float:
    """Seconds from nanoseconds."""
    return ns / NS_PER_S


def ns_from_s(s: float) -> int:
    """Nanoseconds, rounded to the nearest, from seconds. Raises ``ValueError`` for NaN or infinity."""
    if not math.isfinite(s):
        raise ValueError(f"a time must be finite, not {s!r}")
    return round(s * NS_PER_S)


def parse_duration_s(text: str, *, where: str, allow_zero: bool = False) -> float:
    """Seconds from a duration with its unit, such as ``27.6ms``.

    Args:
        text: a positive finite number followed by ``ns``, ``us``, ``ms``, ``s`` or ``min``.
        where: the name of the option that held it, for the error.
        allow_zero: whether zero is a time here.

    Raises:
        UsageError: no number, no unit or an unknown one, or a value that is not finite and positive.
    """
    match = _DURATION.fullmatch(text)
    allowed = "a positive time with its unit: ns, us, ms, s or min"
    hint = f"write, for example, {where} 27.6ms"
    if match is None or match.group(2).lower() not in _DURATION_UNITS_NS:
        raise UsageError("not a time", observed=text, allowed=allowed, where=where, hint=hint)
    value_s = s_from_ns(float(match.group(1)) * _DURATION_UNITS_NS[match.group(2).lower()])
    if not math.isfinite(value_s) or value_s < 0 or (value_s == 0 and not allow_zero):
        raise UsageError("a time must be finite and positive", observed=text, allowed=allowed, where=where, hint=hint)
    return value_s


def format_duration(seconds: float) -> str:
    """A duration in the unit that suits its size, four significant digits: ``27.6 ms``."""
    for limit_s, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit_s:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"
