"""Times that people type, and the one conversion between nanoseconds and seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2gmodel.errors import UsageError
from b2gmodel.units import format_duration, ns_from_s, parse_duration_s, s_from_ns


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("27.6ms", 0.0276),
        (" 27.6 ms ", 0.0276),
        ("1e3us", 0.001),
        ("5µs", 5e-6),  # the micro sign
        ("5μs", 5e-6),  # the Greek letter, which keyboards and web pages give
        ("5US", 5e-6),
        (".5s", 0.5),
        ("2.s", 2.0),
        ("+3ns", 3e-9),
        ("2min", 120.0),
    ],
)
def test_a_time_is_read_in_its_unit(text: str, seconds: float) -> None:
    assert parse_duration_s(text, where="--service") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "ms", "27.6", "27,6ms", "1h", "1 ms 2", "0x1ms", "1e", "--5ms", "1\x00ms"])
def test_what_is_no_time_says_what_is(text: str) -> None:
    with pytest.raises(UsageError) as seen:
        parse_duration_s(text, where="--service")
    assert seen.value.line() == (
        f"--service: not a time: saw {' '.join(repr(text).split())}; allowed: a positive time with its unit: "
        "ns, us, ms, s or min; write, for example, --service 27.6ms"
    )


@pytest.mark.parametrize("text", ["0ms", "-1ms", "nan ms", "NaNms", "infs", "-inf s", "1e999s", "1e-999ms", "-0s"])
def test_a_time_is_finite_and_positive(text: str) -> None:
    with pytest.raises(UsageError, match="--transport: a time must be finite and positive"):
        parse_duration_s(text, where="--transport")


def test_zero_is_a_time_only_where_it_may_be() -> None:
    assert parse_duration_s("0ms", where="--transport", allow_zero=True) == 0.0
    with pytest.raises(UsageError, match="finite and positive"):
        parse_duration_s("-1ms", where="--transport", allow_zero=True)


@given(st.integers(min_value=-(2**51), max_value=2**51))
def test_nanoseconds_survive_seconds(ns: int) -> None:
    assert ns_from_s(s_from_ns(ns)) == ns


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_no_nanoseconds_from_what_is_not_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        ns_from_s(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (3e-9, "3 ns"), (42e-6, "42 us"), (0.0276, "27.6 ms"), (-0.0276, "-27.6 ms"), (61.0, "61 s")],
)
def test_a_time_is_shown_in_the_unit_of_its_size(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=1e-9, max_value=50))
def test_what_is_shown_can_be_read_again(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds), where="x") == pytest.approx(seconds, rel=1e-3)
