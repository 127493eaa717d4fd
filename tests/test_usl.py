"""The scalability law: known coefficients come back, and none comes out below 0."""

from __future__ import annotations

import math

import numpy as np
import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.usl import ScalabilityLaw, fit_usl

FLIGHTS = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize(
    ("contention", "crosstalk"), [(0.05, 0.01), (0.0, 0.02), (0.3, 0.0), (0.0, 0.0), (1.0, 0.0), (0.9, 0.5)]
)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_known_coefficients_come_back(contention: float, crosstalk: float, scale: float) -> None:
    law = ScalabilityLaw(100.0 * scale, contention, crosstalk)
    found = fit_usl(FLIGHTS, [law.at(m) for m in FLIGHTS])
    assert found.single_per_s == pytest.approx(law.single_per_s)
    assert (found.contention, found.crosstalk) == pytest.approx((contention, crosstalk), abs=1e-9)


def test_by_hand() -> None:
    """l = 100, s = 0.1, q = 0.02: X(4) = 400 / (1 + 0.3 + 0.24); the peak is at sqrt(0.9 / 0.02) = 6.7."""
    law = ScalabilityLaw(100.0, 0.1, 0.02)
    assert law.at(1) == 100.0
    assert law.at(4) == pytest.approx(400 / 1.54)
    assert law.peak_flights == pytest.approx(45**0.5)


@pytest.mark.parametrize(
    ("law", "peak"),
    [
        (ScalabilityLaw(1.0, 0.5, 0.0), math.inf),
        (ScalabilityLaw(1.0, 1.0, 0.1), 0.0),
        (ScalabilityLaw(1.0, 2.0, 0.1), 0),
    ],
)
def test_the_peak_at_the_edges(law: ScalabilityLaw, peak: float) -> None:
    assert law.peak_flights == peak


def test_noise_moves_the_fit_a_little() -> None:
    law, rng = ScalabilityLaw(100.0, 0.2, 0.01), np.random.default_rng(1)
    found = fit_usl(FLIGHTS * 4, [law.at(m) * rng.normal(1, 0.01) for m in FLIGHTS * 4])
    assert [found.at(m) for m in FLIGHTS] == pytest.approx([law.at(m) for m in FLIGHTS], rel=0.02)


def test_gains_beyond_linear_make_no_negative_contention() -> None:
    found = fit_usl([1, 2, 3], [100.0, 250.0, 450.0])
    assert (found.contention, found.crosstalk) == (0.0, 0.0)


def test_relative_errors_are_weighed_alike() -> None:
    """A point of 1 % of the others' height counts as much: the fit passes close to it."""
    found = fit_usl([1, 2, 4, 400], [100.0, 150.0, 190.0, 2.0])
    assert found.at(400) == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("flights", [[], [1], [1, 2], [2, 2, 2, 4]])
def test_two_points_are_too_few(flights: list[int]) -> None:
    with pytest.raises(EvidenceError, match="three coefficients need three points"):
        fit_usl(flights, [1.0] * len(flights))


def test_a_curve_that_falls_faster_than_the_law_can() -> None:
    """X falls by more than M (M - 1) takes away: no constant term is left, and X(1) would be infinite."""
    with pytest.raises(EvidenceError, match="the scalability law does not fit"):
        fit_usl([2, 3, 4], [100.0, 10.0, 1.0])
