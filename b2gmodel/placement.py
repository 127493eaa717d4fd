"""Where to batch, predicted: X_C1, X_C2 and X_C3 at c clients, R, and the payload at which batching in a proxy loses.

Rules here: single-flight data and the transport law only; no module that this one imports has seen a measurement.
With c clients, each with one request open:

* C1 passes each request on by itself: the closed network of transport and instances with c batches of one.
* C2 leaves batching to the server: the same transport, and a server that merges what waits, by S(b).
* C3 batches k in the proxy, one batch in flight: with c >= k the next batch waits when one returns, so that it is
  what single-flight measured, k / C_k.

R = (X_C3 - X_C1) / (X_C2 - X_C1). The publication does not spell the formula out: this one is inferred from its
figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from b2gmodel.bulk_server import BulkServer
from b2gmodel.crossover import LEVEL, crossover
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.laws import Floats, Laws, laws_of
from b2gmodel.placement_records import Crossover, PlacementCell
from b2gmodel.predictors import bulk_curves, mva_curves
from b2gmodel.records import Calibration, CalibrationPoint, Estimate, digest_of

DRAWS = 200


@dataclass(frozen=True, slots=True, eq=False)
class PlacementLaws:
    """What the three placements are predicted from.

    Attributes:
        single: laws of a lone request, k = 1.
        batched: laws of a batch of k.
        server: how the model's twin with dynamic batching merges requests.
    """

    single: Laws
    batched: Laws
    server: BulkServer

    def faster_compute(self, factor: float) -> PlacementLaws:
        """The same with all of S divided by ``factor``, transport unchanged."""
        ladder = tuple((size, time_s / factor) for size, time_s in self.server.ladder_s)
        return PlacementLaws(
            _with_compute(self.single, factor),
            _with_compute(self.batched, factor),
            replace(self.server, ladder_s=ladder),
        )

    def faster_link(self, factor: float) -> PlacementLaws:
        """The same with transport ``factor`` times as fast, compute unchanged."""
        return replace(self, single=_with_link(self.single, factor), batched=_with_link(self.batched, factor))


@dataclass(frozen=True, slots=True, eq=False)
class Placements:
    """X of each placement at ``concurrency`` clients, requests a second, shape ``[1 + draws]``; row 0 the estimate."""

    concurrency: int
    c1: Floats
    c2: Floats
    c3: Floats

    @property
    def log_gains(self) -> Floats:
        """log(X_C3 / X_C1), shape ``[1 + draws]``."""
        return np.asarray(np.log(self.c3 / self.c1))

    @property
    def ratios(self) -> Floats:
        """R, shape ``[1 + draws]``; of any sign of its denominator."""
        return np.asarray((self.c3 - self.c1) / (self.c2 - self.c1))


def placement_laws(
    calibration: Calibration, k: int, *, draws: int = DRAWS, seed: int = 1, max_batch: int | None = None
) -> PlacementLaws:
    """The laws behind the three placements.

    Args:
        calibration: of the model without dynamic batching, with points at 1 and k.
        max_batch: the greatest batch that the server's dynamic batching forms; None takes the model's own.

    Raises:
        UsageError: no point at 1 or k.
        EvidenceError: the calibration states no S or D in seconds.
    """
    points = {size: _point(calibration, size) for size in (1, k)}
    rng = np.random.default_rng(seed)
    single, batched = (laws_of(calibration, points[size], draws, rng) for size in (1, k))
    ladder = tuple(sorted((p.k, p.service_s.mean) for p in calibration.points if p.k is not None and p.service_s))
    server = BulkServer(
        ladder_s=ladder,
        max_batch=max_batch or calibration.model.max_batch_size or k,
        instances=calibration.model.instances or 1,
    )
    return PlacementLaws(single, batched, server)


def proxy_gain(laws: PlacementLaws, concurrency: int) -> float:
    """X_C3 / X_C1 - 1 by the estimate; cheaper than all of ``placements``."""
    c1 = mva_curves(laws.single, [concurrency]).values[0, 0]
    return float(laws.batched.batch / laws.batched.cycle_s[0] / c1) - 1


def placements(laws: PlacementLaws, concurrency: int) -> Placements:
    """X_C1, X_C2 and X_C3 at ``concurrency`` clients.

    Raises:
        UsageError: fewer clients than a batch of the proxy holds.
    """
    k = laws.batched.batch
    if concurrency < k:
        raise UsageError(
            "so few clients never fill a batch of the proxy", observed=concurrency, allowed=f">= k = {k}",
            where="concurrency", hint="lower k, or raise the number of clients",
        )  # fmt: skip
    c1 = mva_curves(laws.single, [concurrency]).values[:, 0]
    # No execution can hold more requests than there are clients, and a smaller chain is sooner solved.
    server = replace(laws.server, max_batch=min(laws.server.max_batch, concurrency))
    c2 = bulk_curves(laws.single, server, [concurrency]).values[:, 0]
    c3 = k / laws.batched.cycle_s
    rows = min(len(c1), len(c2), len(c3))
    return Placements(concurrency, c1[:rows], c2[:rows], c3[:rows])


def predicted_cell(
    calibration: Calibration, found: Placements, *, workload: str, k: int, payload_bytes: int
) -> PlacementCell:
    """The record of one cell: X of each placement, the gains and R, with intervals of 90 % over the draws."""
    server_gain = _estimate(found.c2 - found.c1)
    ratio, undefined = None, None
    if server_gain.low is not None and server_gain.low > 0:
        ratio = _estimate(found.ratios)
    else:
        undefined = "X_C2 - X_C1 is not above zero in 95 % of the draws" if server_gain.low is not None else "no draws"
    return PlacementCell(
        workload=workload,
        payload_bytes=payload_bytes,
        transport=calibration.transport or "not stated",
        k=k,
        concurrency=found.concurrency,
        calibration_name=calibration.name,
        calibration_digest=digest_of(calibration),
        c1_per_s=_estimate(found.c1),
        c2_per_s=_estimate(found.c2),
        c3_per_s=_estimate(found.c3),
        proxy_gain_per_s=_estimate(found.c3 - found.c1),
        server_gain_per_s=server_gain,
        gain=_estimate(np.expm1(found.log_gains)),
        ratio=ratio,
        undefined=undefined,
    )  # fmt: skip


def predicted_crossover(
    payload_bytes: Sequence[int], found: Sequence[Placements], *, transport: str, k: int
) -> Crossover:
    """The payload at which X_C3 - X_C1 changes its sign, from the cells of a ladder of payloads."""
    rows = min(len(each.c1) for each in found)
    gains = np.stack([each.log_gains[:rows] for each in found], axis=1)
    return crossover(payload_bytes, gains, transport=transport, k=k, concurrency=found[0].concurrency)


def _point(calibration: Calibration, k: int) -> CalibrationPoint:
    point = calibration.point(k)
    if point is None:
        raise UsageError(
            "placements are predicted from a ladder of batch sizes that holds 1 and k",
            observed=", ".join(str(each.k) for each in calibration.points),
            allowed=f"must hold {k}",
            where=calibration.name,
            hint=f"calibrate it: b2g calibrate --model {calibration.model.name} -k 1,2,4,{max(k, 8)}",
        )
    if point.cycle_s is None or point.service_s is None:
        raise EvidenceError("the calibration does not state S and C in seconds", observed=k, where=calibration.name)
    return point


def _estimate(values: Floats) -> Estimate:
    if len(values) < 2:
        return Estimate(mean=float(values[0]))
    low, high = np.quantile(values[1:], [0.5 - LEVEL / 2, 0.5 + LEVEL / 2]).tolist()
    return Estimate(mean=float(values[0]), low=low, high=high, level=LEVEL)


def _with_compute(laws: Laws, factor: float) -> Laws:
    service_s = laws.service_s / factor
    return replace(
        laws,
        cycle_s=laws.transport_s + service_s,
        service_s=service_s,
        busy_service_s=laws.busy_service_s - (laws.service_s - service_s)[:, np.newaxis],
    )


def _with_link(laws: Laws, factor: float) -> Laws:
    rates = laws.transport_rates_per_s
    return replace(
        laws,
        cycle_s=laws.transport_s / factor + laws.service_s,
        transport_rates_per_s=None if rates is None else rates * factor,
    )
