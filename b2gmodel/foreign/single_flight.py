"""A row at concurrency 1 is single-flight: the one place where such a row becomes a calibration.

Rules here: means alone, of a client of another kind; D is C - S, signed; what is not stated is None.
"""

from __future__ import annotations

from b2gmodel.records import Calibration, CalibrationPoint, Estimate, ModelInfo

NO_PAYLOAD = "payload_bytes is 0 for a payload that the rows do not state; no predictor reads it"


def model_info(
    name: str,
    *,
    instances: int | None = None,
    dynamic_batching: bool | None = None,
    max_batch_size: int | None = None,
) -> ModelInfo:
    """A model of which a source states little; its compute is taken for real."""
    return ModelInfo(
        name=name,
        compute="real",
        compute_table_digest=None,
        platform=None,
        max_batch_size=max_batch_size,
        instances=instances,
        dynamic_batching=dynamic_batching,
        inputs=(),
    )


def single_flight(
    *,
    name: str,
    source: str,
    model: ModelInfo,
    transport: str | None,
    k: int,
    cycle_s: float,
    service_s: float,
    queue_s: float | None,
    throughput_per_s: float,
    payload_bytes: int = 0,
    cycle_cv: float | None = None,
    cycles: int | None = None,
    notes: tuple[str, ...] = (),
) -> Calibration:
    """A calibration of one point, without laws.

    Args:
        k: inferences in the client's request.
        cycle_s: mean latency as the client saw it, C; ``cycle_cv`` its coefficient of variation.
        service_s: compute input, infer and output, S.
        throughput_per_s: inferences a second.
        payload_bytes: of one inference; 0 where not stated, which a note should say.
    """
    point = CalibrationPoint(
        k=k,
        payload_bytes=payload_bytes,
        cycles=cycles,
        cycle_s=Estimate(mean=cycle_s, cv=cycle_cv),
        service_s=Estimate(mean=service_s),
        transport_s=Estimate(mean=cycle_s - service_s),
        queue_s=None if queue_s is None else Estimate(mean=queue_s),
        throughput_per_s=throughput_per_s,
    )
    return Calibration(
        name=name,
        source=source,
        host=None,
        software=None,
        clock=None,
        server=None,
        model=model,
        transport=transport,
        session_ids=(),
        points=(point,),
        raw=None,
        notes=notes,
    )
