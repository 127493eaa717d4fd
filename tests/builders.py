"""Small records for tests: each holds what the code under test reads, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from b2gmodel.ledger import Ledger
from b2gmodel.prediction import predict
from b2gmodel.records import (
    Block,
    Calibration,
    CalibrationPoint,
    Clock,
    ComputeLaw,
    ComputePoint,
    Estimate,
    Measurement,
    ModelInfo,
    Plan,
    Prediction,
    Run,
    ServerInfo,
    Session,
    Software,
    TensorInfo,
    TransportLaw,
    TransportPoint,
    digest_of,
)
from b2gmodel.store import write_record

SOFTWARE = Software(b2gmodel="0", commit=None, python="3", packages={})
PAYLOAD_BYTES = 4 * 3 * 4


def model_info(**changes: object) -> ModelInfo:
    """An ordinary model: batches of up to 8, one instance."""
    facts: dict[str, object] = {
        "name": "m",
        "compute": "emulated",
        "compute_table_digest": None,
        "platform": "python",
        "max_batch_size": 8,
        "instances": 1,
        "dynamic_batching": False,
        "inputs": (TensorInfo(name="x", datatype="FP32", shape=(4, 3)),),
    }
    return ModelInfo.model_validate(facts | changes)


def point(
    k: int | None = 8,
    *,
    service_s: float = 0.010,
    transport_s: float = 0.015,
    blocks: int = 20,
    spread: float = 0.01,
) -> CalibrationPoint:
    """A point whose blocks lie alternately ``spread`` above and below the means, so the means are exact."""
    cycle_s = service_s + transport_s
    signs = [1 + spread * (1 if number % 2 else -1) for number in range(blocks)]
    return CalibrationPoint(
        k=k,
        payload_bytes=PAYLOAD_BYTES,
        cycle_s=Estimate(mean=cycle_s),
        service_s=Estimate(mean=service_s),
        transport_s=Estimate(mean=transport_s),
        transport_share=Estimate(mean=transport_s / cycle_s),
        throughput_per_s=(k or 8) / cycle_s,
        blocks=tuple(Block(session=0, cycle_s=cycle_s * sign, service_s=service_s * sign) for sign in signs),
    )


def transport_law(
    batches_per_s: Sequence[float],
    *,
    held_s: Sequence[float] | float = 0.001,
    queue_s: float = 0.0,
    relative_half_width: float | None = None,
    flights: Sequence[int] | None = None,
) -> TransportLaw:
    """The null model's X(n), n = 1, 2, ..., its instance time ``held_s`` at each, and X's 95 % half-width."""
    numbers = flights or range(1, len(batches_per_s) + 1)
    held = [held_s] * len(batches_per_s) if isinstance(held_s, float) else held_s
    points = []
    for n, rate, service_s in zip(numbers, batches_per_s, held, strict=True):
        half = None if relative_half_width is None else rate * relative_half_width
        transport_s = n / rate - service_s - queue_s
        points.append(
            TransportPoint(
                flights=n,
                batches_per_s=Estimate(mean=rate)
                if half is None
                else Estimate(mean=rate, low=rate - half, high=rate + half, level=0.95),
                cycle_s=n / rate,
                service_s=service_s,
                queue_s=queue_s,
                transport_s=transport_s,
            )
        )
    return TransportLaw(null_model="m_null", k=8, batch_bytes=8 * PAYLOAD_BYTES, points=tuple(points))


def compute_law(*service_s: float) -> ComputeLaw:
    """S(1), S(2), ... with as many instances busy."""
    return ComputeLaw(
        k=8, points=tuple(ComputePoint(flights=j, service_s=each) for j, each in enumerate(service_s, start=1))
    )


def calibration(*points: CalibrationPoint, model: ModelInfo | None = None, name: str = "cal") -> Calibration:
    """A calibration of a server that can be measured; without points it has one of k = 8: M* = 3."""
    return Calibration(
        name=name,
        source="test",
        host=None,
        software=None,
        clock=None,
        server=ServerInfo(name="fake", version="1", address=None, embedded=False),
        model=model or model_info(),
        transport="http",
        session_ids=("s0",),
        points=points or (point(),),
        raw=None,
    )


def plan(flights: Sequence[int] = (1, 2, 3, 4), sessions: int = 4) -> Plan:
    return Plan(flights=tuple(flights), sessions=sessions, seconds_per_run=1.0, baseline_concurrency=8, order_seed=1)


def prediction(of: Calibration | None = None, *, flights: Sequence[int] = (1, 2, 3, 4)) -> Prediction:
    """The closed form's prediction; by default M* = 3 with X(1) = 320 and a plateau of 800 request/s."""
    return predict(of or calibration(), k=None, plan=plan(flights), software=SOFTWARE)


def run(placement: str, flights: int, throughput_per_s: float, failed: int = 0, k: int | None = 8) -> Run:
    """A run of 100 batches in five blocks of the same rate, 12 more before and after them."""
    size = 1 if placement == "C1" or k is None else k
    facts: dict[str, object] = dict.fromkeys(Run.model_fields)
    facts |= {"placement": placement, "flights": flights, "throughput_per_s": throughput_per_s, "failed": failed}
    facts |= {"batches": 100, "full_batches": 100, "delivered_batches": 112, "server_executions": 112}
    facts |= {"requests": 100 * size, "concurrency": size * flights, "blocks_per_s": (throughput_per_s,) * 5}
    return Run.model_validate(facts)


def measurement(
    of: Prediction,
    curve: Mapping[int, Sequence[float]],
    *,
    baseline: float | None = None,
    name: str = "measured",
    **changes: object,
) -> Measurement:
    """A measurement of ``of`` whose evidence is whole: ``curve`` gives X(M) for each M, a value a session."""
    sessions = []
    for number in range(max(map(len, curve.values()))):
        runs = [
            run("C3" if flights == 1 else "C4", flights, values[number])
            for flights, values in curve.items()
            if number < len(values)
        ]
        if baseline is not None:
            runs.append(run("C1", 8, baseline))
        sessions.append(
            Session(
                session_id=f"measured-{number}",
                boot_id="boot",
                begin_boottime_ns=str(1000 + number),
                server_restarted=False,
                warmup_batches=None,
                runs=tuple(runs),
            )
        )
    facts: dict[str, object] = dict.fromkeys(Measurement.model_fields) | {
        "record": "b2g.measurement",
        "version": 1,
        "name": name,
        "prediction_digest": digest_of(of),
        "preregistered": True,
        "source": "test",
        "clock": Clock(domain="CLOCK_MONOTONIC", boot_id="boot"),
        "server": of.server,
        "model": of.model,
        "transport": of.transport,
        "k": of.k,
        "payload_bytes": of.payload_bytes,
        "sessions": tuple(sessions),
        "notes": (),
    }
    return Measurement.model_validate(facts | changes)


def frozen(folder: Path, of: Calibration | None = None, *, flights: Sequence[int] = (1, 2, 3, 4)) -> Path:
    """A prediction frozen in the ledger of ``folder``."""
    return Ledger(folder).freeze(prediction(of, flights=flights))


def written(folder: Path, record: Calibration | Measurement) -> Path:
    return write_record(folder / f"{record.name}.json", record)
