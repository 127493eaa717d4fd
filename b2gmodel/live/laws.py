"""The transport law and the compute law as measurements: the null model with n batches in flight, and the model itself
with at most as many as it has instances.

Neither has more batches of the target model in flight than it has instances, so both may feed a prediction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Final

import numpy as np

from b2gmodel.live.bench import Bench, Setting
from b2gmodel.live.cycles import SingleFlight
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.stall import refuse_stall
from b2gmodel.live.transport import Transport
from b2gmodel.records import ComputeLaw, ComputePoint, Estimate, LoadedPoint, Run, TransportLaw, TransportPoint
from b2gmodel.stats import student_interval
from b2gmodel.units import s_from_ns

LAW_FLIGHTS: Final = (1, 2, 3, 4, 6, 8)
_ROUNDS: Final = 2
# Of each run, at least; and as many lone cycles as a throughput of some per cent takes.
_SECONDS: Final = 0.6
_CYCLES: Final = 25
# Null batches beside the model's own, and how many of its cycles show its S then.
_BESIDE: Final = (0, 1, 2)
_LOADED_CYCLES: Final = 15
_LOADED_ROUNDS: Final = 3
_LEVEL: Final = 0.95
_ORDER_SEED: Final = 1


async def measure_transport_law(
    transport: Transport,
    control: ControlPlane,
    null: ModelSpec,
    k: int,
    *,
    cycle_s: float,
    run_id: str,
    told: Callable[[float], None],
    flights: Sequence[int] = LAW_FLIGHTS,
) -> TransportLaw:
    """The transport's throughput with n batches of ``k`` in flight, in random order, over several rounds.

    Args:
        transport: to the null model.
        null: same inputs as the target, nothing computed.
        cycle_s: the target's own C, by which a run's length is chosen.

    Raises:
        ServerError, EvidenceError: as ``Bench.run``.
    """
    runs = await _runs(transport, control, null, k, flights, max(_SECONDS, _CYCLES * cycle_s), run_id, told)
    return TransportLaw(
        null_model=null.name,
        k=k,
        batch_bytes=k * null.payload_bytes,
        points=tuple(_transport_point(n, runs[n], k) for n in sorted(runs)),
    )


async def measure_loaded_service(
    transport: Transport,
    to_null: Transport,
    control: ControlPlane,
    model: ModelSpec,
    null: ModelSpec,
    k: int,
    *,
    run_id: str,
    told: Callable[[float], None],
) -> tuple[LoadedPoint, ...]:
    """The model's S in single-flight, with batches to the null model in flight beside it: no second one of its own.

    Args:
        transport, to_null: to the model, and to the null model of the same batches.

    Raises:
        ServerError, EvidenceError: as ``SingleFlight.run_unread`` and ``Bench.kept_busy``, or all stood still.
    """
    payloads = make_payloads(null, k * max(_BESIDE), to_null)
    bench = Bench(to_null, control, null, payloads, f"{run_id}.n")
    await bench.warm_up(Setting.of_flights(k, max(_BESIDE)))
    totals = dict.fromkeys(_BESIDE, (0, 0))
    turns = [(turn, beside) for turn in range(_LOADED_ROUNDS) for beside in _BESIDE]
    for step, (turn, beside) in enumerate(turns):
        single = SingleFlight(transport, control, model, k, run_id=f"{run_id}.{turn}.{beside}")
        busy = bench.kept_busy(Setting.of_flights(k, beside), str(step)) if beside else nullcontext()
        async with busy:
            times_ns = [flight.cycle_ns for flight in await single.run_unread(_LOADED_CYCLES)]
        refuse_stall(times_ns, times_ns, where=f"{model.name}, k = {k}")
        executions, service_ns = single.server_totals()
        totals[beside] = (totals[beside][0] + executions, totals[beside][1] + service_ns)
        told((step + 1) / len(turns))
    return tuple(
        LoadedPoint(null_flights=beside, cycles=executions, service_s=s_from_ns(service_ns / executions))
        for beside, (executions, service_ns) in totals.items()
    )


async def warm_server(transport: Transport, control: ControlPlane, null: ModelSpec, k: int, *, run_id: str) -> None:
    """As many null batches at once as the transport law will ever have, so that the server's memory has grown.

    A server that has just started passes a large batch up to twice as slowly as it does after some have been in
    flight together, and single-flight by itself does not get it there.

    Raises:
        ServerError: the server failed.
    """
    widest = Setting.of_flights(k, max(LAW_FLIGHTS))
    payloads = make_payloads(null, widest.concurrency, transport)
    await Bench(transport, control, null, payloads, run_id).warm_up(widest)


async def measure_compute_law(
    transport: Transport,
    control: ControlPlane,
    model: ModelSpec,
    k: int,
    *,
    cycle_s: float,
    run_id: str,
    told: Callable[[float], None],
) -> ComputeLaw:
    """S(j) with j = 1..g batches in flight, g being the model's instances."""
    flights = range(1, (model.instances or 1) + 1)
    runs = await _runs(transport, control, model, k, flights, max(_SECONDS, _CYCLES * cycle_s), run_id, told)
    return ComputeLaw(
        k=k,
        points=tuple(ComputePoint(flights=j, service_s=_mean(run.service_s for run in runs[j])) for j in sorted(runs)),
    )


async def _runs(
    transport: Transport,
    control: ControlPlane,
    model: ModelSpec,
    k: int,
    flights: Sequence[int],
    seconds: float,
    run_id: str,
    told: Callable[[float], None],
) -> dict[int, list[Run]]:
    settings = [Setting.of_flights(k, n) for n in flights]
    payloads = make_payloads(model, k * max(flights), transport)
    bench = Bench(transport, control, model, payloads, run_id)
    await bench.warm_up(settings[-1])
    order = random.Random(_ORDER_SEED)  # noqa: S311  (an order, not a secret)
    runs: dict[int, list[Run]] = {n: [] for n in flights}
    for done in range(_ROUNDS):
        order.shuffle(settings)
        for step, setting in enumerate(settings):
            run, _ = await bench.run(setting, done * len(settings) + step, seconds)
            runs[setting.flights].append(run)
            told((done + (step + 1) / len(settings)) / _ROUNDS)
    return runs


def _mean(values: Iterable[float | None]) -> float:
    """Of values that every live run has."""
    return float(np.mean([value for value in values if value is not None]))


def _transport_point(n: int, runs: Sequence[Run], k: int) -> TransportPoint:
    """By Little's law the cycle of n batches is n / X; what is not the null's queue or instance is transport.

    X is the inverse of the mean time a batch over blocks of equally many batches: with many in flight they come in
    bunches, and a mean of the blocks' rates would lie too high.
    """
    between_s = student_interval(np.array([k / block for run in runs for block in run.blocks_per_s or ()]), _LEVEL)
    batches_per_s = 1.0 / between_s.mean
    spread = between_s.half_width / between_s.mean
    cycle_s = n / batches_per_s
    service_s = _mean(run.service_s for run in runs)
    queue_s = _mean(run.queue_s for run in runs)
    return TransportPoint(
        flights=n,
        batches_per_s=Estimate(
            mean=batches_per_s,
            low=batches_per_s * (1 - spread),
            high=batches_per_s * (1 + spread),
            level=_LEVEL,
        ),
        cycle_s=cycle_s,
        service_s=service_s,
        queue_s=queue_s,
        transport_s=cycle_s - service_s - queue_s,
    )
