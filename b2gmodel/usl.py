"""The Universal Scalability Law, fitted to a measured curve: descriptive, as it has seen the answer.

Source: Gunther (2007), Guerrilla Capacity Planning, ch. 4 and 5: X(M) = l M / (1 + s (M - 1) + q M (M - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from b2gmodel.errors import EvidenceError


@dataclass(frozen=True, slots=True)
class ScalabilityLaw:
    """X(M) with its three coefficients.

    Attributes:
        single_per_s: l, X(1) of the fit, in the unit of the measured throughput.
        contention: s, the share of work that is done one after the other; at least 0.
        crosstalk: q, what each pair costs; at least 0.
    """

    single_per_s: float
    contention: float
    crosstalk: float

    def at(self, flights: int) -> float:
        """X(M)."""
        m = flights
        return self.single_per_s * m / (1.0 + self.contention * (m - 1) + self.crosstalk * m * (m - 1))

    @property
    def peak_flights(self) -> float:
        """The M of the fit's peak, not a whole number; infinite where it has none."""
        if self.crosstalk == 0.0:
            return math.inf
        return math.sqrt(max(1.0 - self.contention, 0.0) / self.crosstalk)


def fit_usl(flights: Sequence[int], throughput_per_s: Sequence[float]) -> ScalabilityLaw:
    """Least squares of the relative errors of M / X(M), which is linear in 1/l, s/l and q/l, none below 0.

    Args:
        flights: at least three different M.
        throughput_per_s: X(M), positive, in any unit.

    Raises:
        EvidenceError: fewer than three M.
    """
    m, x = np.asarray(flights, dtype=float), np.asarray(throughput_per_s, dtype=float)
    if len(set(flights)) < 3:
        raise EvidenceError("three coefficients need three points", observed=len(set(flights)), allowed=">= 3")
    inverse = m / x
    design = np.column_stack([np.ones(len(m)), m - 1, m * (m - 1)]) / inverse[:, np.newaxis]
    (base, contention, crosstalk), _ = nnls(design, np.ones(len(m)))
    # Without the constant term X(1) would be infinite: no contention explains that.
    if base <= 0.0:
        raise EvidenceError("the scalability law does not fit: it has no throughput at M = 1", observed=float(base))
    return ScalabilityLaw(1.0 / base, contention / base, crosstalk / base)
