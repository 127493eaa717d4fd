"""`b2g calibrate`: one model on one server, at a ladder of batch sizes, and the laws that go beyond single-flight."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from b2gmodel.errors import UsageError
from b2gmodel.live.host import describe_clock, describe_host, describe_software
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.laws import (
    LAW_FLIGHTS,
    measure_compute_law,
    measure_loaded_service,
    measure_transport_law,
    warm_server,
)
from b2gmodel.live.point import Table, calibrate_point
from b2gmodel.live.target import Endpoint
from b2gmodel.live.transport import Transport
from b2gmodel.live.transports import DEFAULT_TRANSPORT, check_transport, make_transport
from b2gmodel.records import (
    Calibration,
    CalibrationPoint,
    ModelInfo,
    RealEngine,
    SelfTestLeg,
    ServerInfo,
    TensorInfo,
)

# Where single-flight and the transport law end, for the progress shown.
_SINGLE_FLIGHT_SHARE: Final = 0.4
_LAW_SHARE: Final = 0.85

Progress = Callable[[str, float], None]
"""Told a stage's name and the share of it that is done, at most."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to calibrate.

    Attributes:
        model: its name on the server.
        ladder: batch sizes, each at least 1.
        shapes: dimensions for inputs whose shape the server leaves open.
        budget_s: longest time for one batch size.
        precision: half-width wanted, as a share of the mean cycle.
        transport: how batches travel, a ``TransportName``.
        null_model: the model that computes nothing, for the transport law; None: no transport law.
        law_batches: batch sizes whose transport law is measured; None: that of each.
        law_flights: null batches in flight, from 1.
    """

    model: str
    ladder: tuple[int, ...]
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    budget_s: float = 30.0
    precision: float = 0.02
    transport: str = DEFAULT_TRANSPORT
    null_model: str | None = None
    law_batches: tuple[int, ...] | None = None
    law_flights: tuple[int, ...] = LAW_FLIGHTS


async def calibrate(
    endpoint: Endpoint,
    wanted: Wanted,
    *,
    name: str,
    session_id: str,
    progress: Progress,
    self_test: tuple[SelfTestLeg, ...] | None = None,
) -> tuple[Calibration, Table]:
    """Calibrate one model in one session.

    Args:
        self_test: what the instrument's test of itself found, for the record.

    Returns:
        The calibration, its ``raw`` still None, and the columns of its cycles.

    Raises:
        UsageError: no such model, or one that cannot take the wanted batches.
        ServerError, EvidenceError: the server failed, or somebody else used the model.
    """
    control = ControlPlane(endpoint.host, endpoint.port, awake=True, known=True)
    try:
        about, model, null = await _describe(control, wanted)
        session = _Session(endpoint, control, model, null, wanted, session_id)
        points, tables = [], []
        for step, k in enumerate(wanted.ladder):

            def told(stage: str, share: float, step: int = step, k: int = k) -> None:
                progress(f"{model.name} k={k} {stage}", (step + share) / len(wanted.ladder))

            point, table = await session.point(k, told)
            points.append(point)
            tables.append(table)
    finally:
        control.close()
    calibration = Calibration(
        name=name,
        source="b2g calibrate",
        host=describe_host(),
        software=describe_software(),
        clock=describe_clock(),
        server=ServerInfo(
            name=str(about.get("name", "")),
            version=str(about.get("version", "")),
            address=None if endpoint.embedded else endpoint.address,
            embedded=endpoint.embedded,
        ),
        model=model_info(model, endpoint),
        transport=wanted.transport,
        session_ids=(session_id,),
        points=tuple(points),
        raw=None,
        self_test=self_test,
        notes=_notes(model, points),
    )
    return calibration, {column: [value for table in tables for value in table[column]] for column in tables[0]}


async def check_wanted(endpoint: Endpoint, wanted: Sequence[Wanted]) -> None:
    """Ask the server whether all of this can be calibrated, before anything takes time. Raises as ``calibrate``."""
    control = ControlPlane(endpoint.host, endpoint.port)
    try:
        for each in wanted:
            check_transport(each.transport, endpoint)
            await _describe(control, each)
    finally:
        control.close()


async def _describe(control: ControlPlane, wanted: Wanted) -> tuple[dict[str, Any], ModelSpec, ModelSpec | None]:
    """The server, the model and the null model, provided that they take the wanted batches."""
    about = await control.server_metadata()
    model = await control.model(wanted.model, wanted.shapes)
    null = None
    if wanted.null_model is not None:
        null = await control.model(wanted.null_model, wanted.shapes, where="--null-model")
    _check_ladder(model, wanted.ladder)
    _check_null(model, null)
    return about, model, null


def model_info(model: ModelSpec, endpoint: Endpoint) -> ModelInfo:
    """The model as records hold it."""
    # Whatever a model says of itself other than that it is real is some emulation.
    compute = model.compute if model.compute in ("real", "none") else "emulated"
    return ModelInfo.model_validate(
        {
            "name": model.name,
            "compute": compute,
            "compute_table_digest": endpoint.table_digest,
            "platform": model.platform,
            "max_batch_size": model.max_batch_size,
            "instances": model.instances,
            "dynamic_batching": model.dynamic_batching,
            "preferred_batch_sizes": model.preferred_batch_sizes,
            "queue_delay_s": model.queue_delay_s,
            "engine": _engine(model) if compute == "real" else None,
            "inputs": tuple(TensorInfo(name=t.name, datatype=t.datatype, shape=t.shape) for t in model.inputs),
        }
    )


def _engine(model: ModelSpec) -> RealEngine | None:
    """What our own server's real model says that it computes with; None for any other's."""
    said = model.parameters
    try:
        return RealEngine.model_validate(
            {
                "name": said["b2g_engine"],
                "version": said["b2g_engine_version"],
                "provider": said["b2g_provider"],
                "device_name": said["b2g_device_name"] or None,
                "threads": int(said["b2g_threads"]),
                "model_digest": said["b2g_model_digest"],
            }
        )
    except (KeyError, ValueError):
        return None


def check_batch(model: ModelSpec, k: int, *, where: str) -> None:
    """Raises ``UsageError`` where the model cannot take batches of ``k``."""
    if model.max_batch_size == 0 and k > 1:
        raise UsageError(
            "the model does not batch (its max_batch_size is 0)",
            observed=k,
            allowed="1",
            where=where,
            hint=f"give {model.name} a max_batch_size in its configuration, or calibrate it with -k 1",
        )
    if k > max(1, model.max_batch_size):
        raise UsageError(
            "the batch is larger than the model takes",
            observed=k,
            allowed=f"1 to {model.max_batch_size}",
            where=where,
            hint="choose a smaller k, or raise max_batch_size in the model's configuration",
        )


@dataclass(frozen=True, slots=True)
class _Session:
    """What all batch sizes of a calibration share."""

    endpoint: Endpoint
    control: ControlPlane
    model: ModelSpec
    null: ModelSpec | None
    wanted: Wanted
    session_id: str

    async def point(self, k: int, told: Progress) -> tuple[CalibrationPoint, Table]:
        """Single-flight at ``k``, then the transport law and, with several instances, the compute law."""
        run_id = f"{self.session_id}.k{k}"
        has_law = self.null is not None and k in (self.wanted.law_batches or (k,))
        single_share = _SINGLE_FLIGHT_SHARE if has_law else 1.0
        if self.null is not None:
            async with self._transport(self.null) as to_null:
                await warm_server(to_null, self.control, self.null, k, run_id=f"{run_id}.w")
        async with self._transport(self.model) as transport:
            point, table = await calibrate_point(
                transport,
                self.control,
                self.model,
                k,
                budget_s=self.wanted.budget_s,
                precision=self.wanted.precision,
                trace_file=self.endpoint.trace_file,
                run_id=run_id,
                told=lambda share: told("single-flight", share * single_share),
            )
            if (self.model.instances or 1) > 1 and not self.model.dynamic_batching:
                law = await measure_compute_law(
                    transport,
                    self.control,
                    self.model,
                    k,
                    cycle_s=_cycle_s(point),
                    run_id=f"{run_id}.c",
                    told=lambda _: told("instances", single_share),
                )
                point = point.model_copy(update={"compute_law": law})
        if self.null is not None and has_law:
            async with self._transport(self.null) as transport:
                transport_law = await measure_transport_law(
                    transport,
                    self.control,
                    self.null,
                    k,
                    cycle_s=_cycle_s(point),
                    run_id=f"{run_id}.n",
                    flights=self.wanted.law_flights,
                    told=lambda share: told("transport", single_share + share * (_LAW_SHARE - single_share)),
                )
                if not self.model.dynamic_batching:
                    async with self._transport(self.model) as own:
                        loaded = await measure_loaded_service(
                            own,
                            transport,
                            self.control,
                            self.model,
                            self.null,
                            k,
                            run_id=f"{run_id}.l",
                            told=lambda share: told("service under load", _LAW_SHARE + share * (1 - _LAW_SHARE)),
                        )
                    transport_law = transport_law.model_copy(update={"loaded": loaded})
            point = point.model_copy(update={"transport_law": transport_law})
        return point, table

    @asynccontextmanager
    async def _transport(self, model: ModelSpec) -> AsyncIterator[Transport]:
        transport = make_transport(self.wanted.transport, self.endpoint, model)
        try:
            yield transport
        finally:
            await transport.aclose()


def _cycle_s(point: CalibrationPoint) -> float:
    assert point.cycle_s is not None
    return point.cycle_s.mean


def _check_null(model: ModelSpec, null: ModelSpec | None) -> None:
    """The null model must take the very batches of the target."""
    if null is None:
        return
    for aspect in ("inputs", "max_batch_size"):
        wanted, seen = getattr(model, aspect), getattr(null, aspect)
        if wanted != seen:
            raise UsageError(
                f"the null model does not take the model's batches: its {aspect} differs",
                observed=str(seen),
                allowed=str(wanted),
                where="--null-model",
                hint="b2g server --export-null FOLDER writes one that fits",
            )


def _check_ladder(model: ModelSpec, ladder: Sequence[int]) -> None:
    for k in ladder:
        check_batch(model, k, where="-k")


def _notes(model: ModelSpec, points: Sequence[CalibrationPoint]) -> tuple[str, ...]:
    notes = []
    if model.compute == "emulated":
        notes.append("the compute is emulated: the instance is held for a tabled time and uses no processor")
    engine = _engine(model) if model.compute == "real" else None
    if engine is not None:
        notes.append(f"the compute is real, the weights are random: {engine.sentence}")
    if model.dynamic_batching:
        notes.append("the server's dynamic batching is on for this model: the closed form does not apply above M = 1")
    if any(point.transport_law is None for point in points):
        notes.append(
            "no transport law was measured, as that takes a null model (--null-model): predicted heights are upper "
            "bounds"
        )
    if any(point.stopped_by == "budget" for point in points):
        notes.append("the budget ended before the wanted precision: intervals are wider than asked for")
    return tuple(notes)
