"""S of a batch that comes after a pause, of batches back to back, and of batches under load: three regimes of a device.

A GPU lowers its clocks between sparse requests, so that a single-flight S can be another than the S of a busy one.
Each regime is told with the mean of the GPU's readings meanwhile, None without a GPU.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from b2gmodel.live.bench import Bench, Setting
from b2gmodel.live.cycles import SingleFlight
from b2gmodel.live.gpu import Gpu, GpuWatch, means
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.target import Endpoint
from b2gmodel.live.transport import Transport
from b2gmodel.live.transports import make_transport
from b2gmodel.units import s_from_ns

PAUSES_S: Final = (1.0, 0.1, 0.0)

_LEAST_CYCLES: Final = 5
_WARMUP_CYCLES: Final = 5


@dataclass(frozen=True, slots=True)
class Regime:
    """S in one regime.

    Attributes:
        pause_s: before each batch; None under load, where batches wait for the device and not the other way round.
        flights: batches in flight.
        executions: how many S is the mean of.
        service_s: mean S; ``median_s`` its median, None under load, where only the mean is known.
        gpu: mean readings of the GPU over the regime, pauses included.
    """

    pause_s: float | None
    flights: int
    executions: int
    service_s: float
    median_s: float | None
    gpu: dict[str, float | None]


async def service_regimes(
    endpoint: Endpoint,
    model_name: str,
    k: int,
    *,
    transport_name: str = "http",
    flights: int = 3,
    seconds: float = 5.0,
    pauses_s: Sequence[float] = PAUSES_S,
    gpu: Gpu | None = None,
) -> list[Regime]:
    """S after each pause in turn, the longest first, then under ``flights`` batches in flight.

    Args:
        seconds: how long each regime lasts; at least five batches.

    Raises:
        UsageError, ServerError, EvidenceError: as a calibration's.
    """
    control = ControlPlane(endpoint.host, endpoint.port)
    transport: Transport | None = None
    try:
        model = await control.model(model_name, {})
        transport = make_transport(transport_name, endpoint, model)
        with GpuWatch(gpu) as watch:
            flight = SingleFlight(transport, control, model, k, run_id="idle")
            await flight.run(_WARMUP_CYCLES)
            found = [await _after_pauses(flight, pause_s, seconds, watch) for pause_s in pauses_s]
            found.append(await _under_load(transport, control, model, Setting.of_flights(k, flights), seconds, watch))
        return found
    finally:
        if transport is not None:
            await transport.aclose()
        control.close()


async def _after_pauses(flight: SingleFlight, pause_s: float, seconds: float, watch: GpuWatch) -> Regime:
    begin_ns = time.monotonic_ns()
    services_s: list[float] = []
    while len(services_s) < _LEAST_CYCLES or s_from_ns(time.monotonic_ns() - begin_ns) < seconds:
        await asyncio.sleep(pause_s)
        services_s += [s_from_ns(cycle.service_ns) for cycle in await flight.run(1)]
    seen = means(watch.samples, begin_ns, time.monotonic_ns())
    return Regime(pause_s, 1, len(services_s), statistics.fmean(services_s), statistics.median(services_s), seen)


async def _under_load(
    transport: Transport, control: ControlPlane, model: ModelSpec, setting: Setting, seconds: float, watch: GpuWatch
) -> Regime:
    bench = Bench(transport, control, model, make_payloads(model, setting.concurrency, transport), "load")
    await bench.warm_up(setting)
    begin_ns = time.monotonic_ns()
    run, _ = await bench.run(setting, 0, seconds)
    seen = means(watch.samples, begin_ns, time.monotonic_ns())
    assert run.service_s is not None, "a run against a server has its counters"
    return Regime(None, setting.flights, run.server_executions or 0, run.service_s, None, seen)
