"""Calibrations as benchmarks need them: S, D and a transport law, and nothing stated of where they come from."""

from __future__ import annotations

from b2gmodel.records import Calibration, CalibrationPoint, Estimate, ModelInfo, RawFile, TensorInfo, TransportPoint


def transport_point(
    flights: int, batches_per_s: float, service_s: float, queue_s: float, *, spread: float | None = None
) -> TransportPoint:
    """A null model's row; ``spread`` is the half-width of its 95 % interval, relative; None states no interval."""
    cycle_s = flights / batches_per_s
    rate = Estimate(mean=batches_per_s)
    if spread is not None:
        low, high = batches_per_s * (1 - spread), batches_per_s * (1 + spread)
        rate = Estimate(mean=batches_per_s, low=low, high=high, level=0.95)
    return TransportPoint(
        flights=flights,
        batches_per_s=rate,
        cycle_s=cycle_s,
        service_s=service_s,
        queue_s=queue_s,
        transport_s=cycle_s - service_s - queue_s,
    )


def bare_calibration(name: str, source: str, point: CalibrationPoint, raw: RawFile | None = None) -> Calibration:
    """Of one instance with emulated compute and no dynamic batching, whose greatest batch is the point's."""
    return Calibration(
        name=name,
        source=source,
        host=None,
        software=None,
        clock=None,
        server=None,
        model=ModelInfo(
            name=name,
            compute="emulated",
            compute_table_digest=None,
            platform=None,
            max_batch_size=point.k,
            instances=1,
            dynamic_batching=False,
            inputs=(TensorInfo(name=None, datatype=None, shape=()),),
        ),
        transport=None,
        session_ids=(),
        points=(point,),
        raw=raw,
    )
