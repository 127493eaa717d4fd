"""A sweep as records: its row at concurrency 1 as a calibration, all rows as a measurement that came first.

Rules here: a row that did not stabilise carries nothing; a measurement of these rows is never pre-registered; the same
files give the same records, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from b2gmodel.foreign.findings import Finding
from b2gmodel.foreign.rows import Row, Sweep
from b2gmodel.foreign.single_flight import NO_PAYLOAD, model_info, single_flight
from b2gmodel.records import Calibration, Estimate, Measurement, ModelInfo, Run, Session


def calibration(
    sweep: Sweep, findings: Iterable[Finding], *, name: str, source: str, payload_bytes: int | None
) -> Calibration:
    """The row at concurrency 1, of a sweep that is usable."""
    alone = sweep.alone
    assert alone is not None
    assert alone.latency_s is not None
    assert alone.service_s is not None
    return single_flight(
        name=name,
        source=source,
        model=_model(sweep, findings, name),
        transport=_transport(sweep),
        k=sweep.batch_size or 1,
        cycle_s=alone.latency_s,
        cycle_cv=alone.latency_cv,
        cycles=alone.batches or None,
        service_s=alone.service_s,
        queue_s=alone.queue_s,
        throughput_per_s=alone.throughput_per_s,
        payload_bytes=payload_bytes or 0,
        notes=_notes(sweep, findings, payload_bytes),
    )


def measurement(
    sweep: Sweep, findings: Iterable[Finding], *, name: str, source: str, digest: str, payload_bytes: int | None
) -> Measurement | None:
    """All rows; None where there is none beside concurrency 1, so that there is nothing to compare.

    Args:
        digest: of the files, which names the session.
    """
    if len(sweep.rows) < 2:
        return None
    session = Session(
        session_id=f"imported-{digest[:16]}",
        boot_id=None,
        begin_boottime_ns=None,
        server_restarted=False,
        warmup_batches=None,
        runs=tuple(_run(sweep, row) for row in sweep.rows),
    )
    return Measurement(
        name=f"{name}-measured",
        prediction_digest=None,
        preregistered=False,
        source=source,
        host=None,
        software=None,
        clock=None,
        server=None,
        model=_model(sweep, findings, name),
        transport=_transport(sweep),
        k=sweep.batch_size,
        payload_bytes=payload_bytes or 0,
        sessions=(session,),
        raw=None,
        notes=(
            "not pre-registered: the figures came before any prediction",
            "the run with one in flight is the calibration's own row; it is here so that M* has it to be compared with",
            *_notes(sweep, findings, payload_bytes),
        ),
    )


def _run(sweep: Sweep, row: Row) -> Run:
    placement: Literal["C3", "C4"] = "C3" if row.concurrency == 1 else "C4"
    return Run(
        placement=placement,
        flights=row.concurrency,
        throughput_per_s=row.throughput_per_s,
        duration_s=row.duration_s,
        batches=row.batches,
        delivered_batches=row.batches,
        requests=None if row.batches is None else row.batches * (sweep.batch_size or 1),
        failed=row.failed,
        cycle_s=None
        if not row.latency_s
        else Estimate(
            mean=row.latency_s,
            cv=row.latency_cv,
            quantiles=None if row.quantiles is None else dict(row.quantiles),
        ),
        service_s=row.service_s,
        queue_s=row.queue_s,
        server_executions=row.executions,
    )


def _model(sweep: Sweep, findings: Iterable[Finding], name: str) -> ModelInfo:
    merges = any(each.name == "dynamic-batching" and each.is_shown for each in findings)
    return model_info(
        sweep.model or name,
        instances=sweep.instances,
        dynamic_batching=True if merges else None,
        max_batch_size=sweep.max_batch_size,
    )


def _transport(sweep: Sweep) -> str | None:
    return "shm" if sweep.shared_memory else sweep.protocol


def _notes(sweep: Sweep, findings: Iterable[Finding], payload_bytes: int | None) -> tuple[str, ...]:
    return (
        f"from {' and '.join(kind.value for kind in sweep.kinds)}: averages over requests, by a client of another "
        "kind; its cycle holds its own packing and sending, and D that and the server's queue",
        "whether the compute was real is not stated, and taken so",
        *(() if payload_bytes else (NO_PAYLOAD,)),
        *(each.line for each in findings),
    )
