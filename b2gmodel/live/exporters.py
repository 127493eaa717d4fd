"""Where a proxy's instruments go: an endpoint that Prometheus scrapes, a collector that takes OTLP, or both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from b2gmodel import __version__
from b2gmodel.errors import SetupError, UsageError
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.proxy import Proxy
from b2gmodel.live.telemetry import Gauges, Labels, ProxyInstruments, ServicePoller

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

_OTLP_PATH: Final = "/v1/metrics"
_OTLP_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Export:
    """Where to, and how often.

    Attributes:
        host, port: where Prometheus scrapes; port 0 takes a free one, None offers nothing.
        otlp_url: where OTLP goes by HTTP; None sends nothing.
        otlp_interval_s: between two exports by OTLP.
        poll_s: between two readings of the server's counters, for S and D.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    otlp_url: str | None = None
    otlp_interval_s: float = 10.0
    poll_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A proxy's running telemetry.

    Attributes:
        instruments, poller: what records.
        scrape_url: what Prometheus reads; None where nothing is offered.
    """

    instruments: ProxyInstruments
    poller: ServicePoller
    scrape_url: str | None


def parse_otlp_url(text: str) -> str:
    """A collector's URL; the path of OTLP's metrics is added where there is none. Raises ``UsageError``."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(
            "not the address of an OTLP collector",
            observed=text,
            allowed="http:// or https:// and HOST:PORT",
            where="--otlp",
            hint="write, for example, --otlp http://localhost:4318",
        )
    return parts._replace(path=_OTLP_PATH).geturl() if parts.path in ("", "/") else text


@asynccontextmanager
async def telemetry(proxy: Proxy, labels: Labels, export: Export, control: ControlPlane) -> AsyncIterator[Telemetry]:
    """Instruments on ``proxy``, exported until the end of the context; what OTLP has not sent yet goes then.

    Args:
        proxy: not serving yet, so that no request goes uncounted.
        labels: attributes of every data point.
        export: where to.
        control: a connection to the proxy's server, for this use alone; closed at the end.

    Raises:
        SetupError: the port cannot be listened on.
    """
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
    from opentelemetry.sdk.resources import Resource

    with contextlib.closing(control), contextlib.ExitStack() as stack:
        readers: list[MetricReader] = []
        scrape_url = None
        if export.port is not None:
            reader, scrape_url = stack.enter_context(_scraped(export.host, export.port))
            readers.append(reader)
        if export.otlp_url is not None:
            readers.append(_pushing(export.otlp_url, export.otlp_interval_s))
        resource = Resource.create({"service.name": "b2g-proxy", "service.version": __version__})
        provider = MeterProvider(readers, resource, exemplar_filter=AlwaysOffExemplarFilter(), shutdown_on_exit=False)
        poller = ServicePoller(control, proxy.model.name, interval_s=export.poll_s)
        batcher = proxy.gateway.batcher
        gauges = Gauges(lambda: batcher.counts.waiting, lambda: batcher.flights_used)
        instruments = ProxyInstruments(provider.get_meter("b2gmodel", __version__), labels, gauges, poller.matcher)
        proxy.add_observer(instruments)
        try:
            await poller.read()
            async with _running(poller.run(instruments)):
                yield Telemetry(instruments, poller, scrape_url)
        finally:
            await asyncio.to_thread(provider.shutdown)  # it may have to wait for a collector


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """``work`` beside the context, cancelled at its end; what it had failed with is raised then."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


@contextmanager
def _scraped(host: str, port: int) -> Iterator[tuple[MetricReader, str]]:
    """A reader behind an HTTP endpoint, in a thread of its own, and the endpoint's URL."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise SetupError(
            "cannot offer metrics", observed=str(error), where=f"{host}:{port}", hint="is the port in use?"
        ) from error
    try:
        place = f"[{host}]" if ":" in host else host
        yield reader, f"http://{place}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _pushing(url: str, interval_s: float) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(endpoint=url, timeout=_OTLP_TIMEOUT_S)
    return PeriodicExportingMetricReader(exporter, export_interval_millis=interval_s * 1000)
