"""The ``simulation`` predictor: the laws of a prediction as lines of stations, simulated draw by draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from b2gmodel.laws import Laws
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.predictor import simulated_curves
from b2gmodel.sim.question import Question
from b2gmodel.sim.stations import Line


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What ``predict`` calls for its ``simulation`` predictor.

    Transport is the flow-equivalent station, shared evenly by the batches inside (a delay where no transport law was
    measured), and each batch brings work with the measured spread; instances serve in order of arrival.

    Attributes:
        cycles_s: measured single-flight cycles, columns D and S in seconds, resampled whole; None takes gamma
            distributions with the calibration's coefficients of variation (constant where it states none).
        draws: of the calibration's uncertainty that are simulated.
        cycles: for each draw and M, after ``warmup``.
        workers: processes; the numbers do not depend on them.
    """

    cycles_s: Floats | None = None
    draws: int = 200
    cycles: int = 20_000
    warmup: int = 1_000
    workers: int = 1

    def __call__(self, laws: Laws, flights: Sequence[int], seed: int) -> Floats:
        """X(M) in requests a second, shape ``[1 + d, M]``, d the smaller of the two numbers of draws."""
        rows = 1 + min(self.draws, laws.draws)
        lines = [self._line(laws, row) for row in range(rows)]
        batches = simulated_curves(lines, flights, seed, cycles=self.cycles, warmup=self.warmup, workers=self.workers)
        return np.asarray(laws.batch * batches)

    def _line(self, laws: Laws, row: int) -> Line:
        rates, busy_s = laws.transport_rates_per_s, tuple(laws.busy_service_s[row].tolist())
        # Times that are not all positive (clock against counters) have no distribution: their spread has.
        is_physical = self.cycles_s is not None and bool((self.cycles_s > 0).all())
        return Question(
            service_s=busy_s[0],
            transport_s=float(laws.transport_s[row]),
            service_cv=laws.service_cv or 0.0,
            transport_cv=laws.transport_cv or 0.0,
            cycles_s=self.cycles_s if is_physical else None,
            transport_rates_per_s=None if rates is None else tuple(rates[row].tolist()),
            instances=laws.instances,
            busy_service_s=busy_s,
        ).line()
