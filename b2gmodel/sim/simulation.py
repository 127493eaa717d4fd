"""The ``simulation`` predictor: the laws of a prediction as lines of stations, simulated draw by draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from b2gmodel.laws import Laws
from b2gmodel.sim.distributions import Constant, CycleTimes, Distribution, Floats, Gamma, Independent, Resampled
from b2gmodel.sim.predictor import simulated_curves
from b2gmodel.sim.stations import Line, Station

TRANSPORT: Final = "transport"
GPU: Final = "gpu"
_LEAST_CV: Final = 1e-3


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
        busy_s = laws.busy_service_s[row].tolist()
        gpu = Station.queue(GPU) if len(busy_s) == 1 else Station.instances(GPU, busy_s)
        transport, work = Station.delay(TRANSPORT), float(laws.transport_s[row])
        if laws.transport_rates_per_s is not None:
            transport, work = Station.flow_equivalent(TRANSPORT, laws.transport_rates_per_s[row].tolist()), 1.0
        return Line((transport, gpu), (TRANSPORT, GPU), self._times(laws, work, busy_s[0]), GPU)

    def _times(self, laws: Laws, transport_work: float, service_s: float) -> CycleTimes:
        cycles_s = self.cycles_s
        if cycles_s is not None and (cycles_s > 0).all():
            return Resampled(cycles_s / cycles_s.mean(axis=0) * [transport_work, service_s])
        return Independent([_spread(transport_work, laws.transport_cv), _spread(service_s, laws.service_cv)])


def _spread(mean: float, cv: float | None) -> Distribution:
    return Gamma(mean, cv) if cv is not None and cv > _LEAST_CV else Constant(mean)
