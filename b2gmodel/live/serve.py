"""The proxy as a process: from a server's address to a drained, counted end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from b2gmodel.batcher import Placement, Policy
from b2gmodel.live.descriptors import allow_files
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.observer import Snapshot
from b2gmodel.live.proxy import Proxy, ProxyLimits
from b2gmodel.live.pulse import Pulse, Vitals
from b2gmodel.live.target import Endpoint
from b2gmodel.live.tls import ServerTls
from b2gmodel.live.transports import make_transport

if TYPE_CHECKING:
    from b2gmodel.live.exporters import Export

_SPARE_FILES: Final = 64
_POLL_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Service:
    """What to serve, where, and how.

    Attributes:
        endpoint, model, shapes: the server, its model entry, and sizes for dynamic input dimensions.
        transport: ``http``, ``grpc`` or ``shm``.
        placement, policy, limits: of the proxy.
        host, port, allow_public: where to listen.
        drain_s: longest time for a graceful end.
        tls: what clients speak; None for plain TCP.
        watch: told, in the loop, how the proxy fares, and how often, in seconds; None for nobody.
        export: where the metrics go; None for nowhere.
    """

    endpoint: Endpoint
    model: str
    shapes: Mapping[str, tuple[int, ...]]
    transport: str
    placement: Placement
    policy: Policy
    limits: ProxyLimits
    host: str
    port: int
    allow_public: bool
    drain_s: float
    tls: ServerTls | None = None
    watch: tuple[Callable[[Vitals], None], float] | None = None
    export: Export | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a service ended: its counters, and whether all that it had taken was finished."""

    snapshot: Snapshot
    finished: bool


Listening = Callable[[Proxy, tuple[str, int], str | None], None]
"""Told of the proxy, its address, and the URL that Prometheus reads, once clients can connect."""


async def serve(service: Service, listening: Listening) -> Ended:
    """Serve until SIGTERM or SIGINT, then drain; a second signal breaks the draining off.

    Args:
        service: what to serve.
        listening: called once.

    Raises:
        UsageError, ServerError, SetupError: the server, the model, the address or the limits do not do.
    """
    allow_files(service.limits.most_connections + service.policy.flights + _SPARE_FILES, where="--connections")
    context = None if service.tls is None else service.tls.context()
    control = ControlPlane(service.endpoint.host, service.endpoint.port)
    try:
        model = await control.model(service.model, service.shapes)
    finally:
        control.close()
    transport = make_transport(service.transport, service.endpoint, model)
    try:
        run_id = f"serve-{uuid.uuid4().hex[:8]}"
        proxy = Proxy(model, service.policy, transport, run_id=run_id, limits=service.limits)
        await transport.warm(service.policy.flights)
        async with _exported(service, proxy) as scrape_url:
            try:
                signals = _signals()
                address = await proxy.start(service.host, service.port, allow_public=service.allow_public, tls=context)
                listening(proxy, address, scrape_url)
                async with _watched(service, proxy):
                    await signals.get()
                    finished = await _drain(proxy, service.drain_s, signals)
            finally:
                await proxy.aclose()
        return Ended(proxy.snapshot(), finished)
    finally:
        await transport.aclose()


@contextlib.asynccontextmanager
async def _exported(service: Service, proxy: Proxy) -> AsyncIterator[str | None]:
    """The proxy's metrics go where the service says; the URL that Prometheus reads, if one is offered."""
    if service.export is None:
        yield None
        return
    from b2gmodel.live.exporters import telemetry
    from b2gmodel.live.telemetry import Labels

    labels = Labels(service.model, service.placement.value, service.transport)
    control = ControlPlane(service.endpoint.host, service.endpoint.port)
    async with telemetry(proxy, labels, service.export, control) as running:
        yield running.scrape_url


@contextlib.asynccontextmanager
async def _watched(service: Service, proxy: Proxy) -> AsyncIterator[None]:
    """Whoever watches is told now and then, beside the proxy's work."""
    if service.watch is None:
        yield
        return
    from b2gmodel.live.telemetry import ServicePoller

    tell, interval_s = service.watch
    control = ControlPlane(service.endpoint.host, service.endpoint.port)
    poller = ServicePoller(control, service.model, interval_s=_POLL_S)
    pulse = Pulse(poller.matcher, proxy.model.instances, service.policy.queue_limit, time.monotonic_ns())
    proxy.add_observer(pulse)
    tasks = [asyncio.create_task(poller.run(pulse)), asyncio.create_task(_tell(proxy, pulse, tell, interval_s))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        control.close()


async def _tell(proxy: Proxy, pulse: Pulse, tell: Callable[[Vitals], None], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        tell(pulse.read(time.monotonic_ns(), proxy.snapshot()))


async def _drain(proxy: Proxy, limit_s: float, signals: asyncio.Queue[signal.Signals]) -> bool:
    draining = asyncio.ensure_future(proxy.drain(limit_s))
    again = asyncio.ensure_future(signals.get())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if draining.done():
        return draining.result()
    draining.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await draining
    return False


def _signals() -> asyncio.Queue[signal.Signals]:
    """The signals to stop, as they come."""
    queue: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, queue.put_nowait, number)
    return queue
