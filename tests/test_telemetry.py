"""The ten instruments: exact values, the documentation's table, OTLP on the wire, the command that serves."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from proxy_rig import run
from telemetry_rig import LABELS, MODEL, fetch, load, watched
from test_serve import served

from b2gmodel.errors import SetupError, UsageError
from b2gmodel.flights import ExchangeTimes, Flight
from b2gmodel.live.exporters import Export, parse_otlp_url
from b2gmodel.live.fake import FakeScript, FakeServer
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.observer import Outcome, Snapshot
from b2gmodel.live.telemetry import (
    BATCH_SIZE_BOUNDS,
    DURATION_BOUNDS_S,
    INSTRUMENTS,
    Gauges,
    ProxyInstruments,
    ServicePoller,
)
from b2gmodel.live.windows import Skip, Window, WindowMatcher

ROOT = Path(__file__).parent.parent
COMMON = {"b2g.model": "m", "b2g.placement": "C4", "b2g.transport": "http"}
NAMES = {each.name for each in INSTRUMENTS}


def flight(size: int, wait_ns: int, cycle_ns: int, failed: bool = False) -> Flight:
    return Flight(0, size, 1000, 1000 + wait_ns, ExchangeTimes(), 1000 + wait_ns + cycle_ns, failed)


class Meter:
    """Instruments whose data points the test reads."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.closed: list[Window] = []
        self.matcher = WindowMatcher(self.closed.append)
        gauges = Gauges(lambda: 5, lambda: 2)
        self.instruments = ProxyInstruments(self._provider.get_meter("test"), LABELS, gauges, self.matcher)

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Each data point's attributes beyond the common ones, and the point."""
        points = []
        for point in self.metrics()[name].data.data_points:
            assert COMMON.items() <= point.attributes.items()
            points.append(({key: value for key, value in point.attributes.items() if key not in COMMON}, point))
        return points

    def values(self, name: str, key: str) -> dict[Any, Any]:
        return {attributes[key]: point.value for attributes, point in self.points(name)}


@pytest.fixture
def meter() -> Iterator[Meter]:
    it = Meter()
    yield it
    it._provider.shutdown()


def test_there_are_ten_named_and_in_units_of_the_conventions(meter: Meter) -> None:
    meter.instruments.flight_done(flight(1, 0, 1))
    asyncio.run(meter.instruments.record(Window(1, 1, 1, 2)))
    metrics = meter.metrics()
    assert len(INSTRUMENTS) == len(NAMES) == 10
    assert set(metrics) == NAMES
    for it in INSTRUMENTS:
        assert re.fullmatch(r"b2g(\.[a-z][a-z_]*[a-z])+", it.name)
        assert it.unit in ("s", "By", "{request}", "{flight}")
        assert not any(other.startswith(it.name + ".") for other in NAMES), "a name is no other's namespace"
        assert (metrics[it.name].unit, metrics[it.name].description) == (it.unit, it.meaning)
        for attributes, _ in meter.points(it.name):
            assert set(attributes) == set(it.attributes)


def test_requests_bytes_and_gauges(meter: Meter) -> None:
    for outcome, bytes_in, bytes_out in [
        (Outcome.ANSWERED, 100, 7),
        (Outcome.ANSWERED, 100, 8),
        (Outcome.BUSY, 100, 0),
        (Outcome.DRAINING, 10, 0),
        (Outcome.REFUSED, 1, 0),
        (Outcome.UPSTREAM, 100, 0),
    ]:
        meter.instruments.request_done(outcome, bytes_in, bytes_out)
    ended = meter.values("b2g.request.ended", "b2g.outcome")
    assert set(ended) == set(Outcome)
    assert {outcome: count for outcome, count in ended.items() if count} == {
        "answered": 2,
        "busy": 1,
        "draining": 1,
        "refused": 1,
        "upstream": 1,
    }
    assert meter.values("b2g.request.rejected", "b2g.outcome") == {"busy": 1, "draining": 1, "refused": 1}
    assert meter.values("b2g.network.io", "network.io.direction") == {"receive": 411, "transmit": 15}
    assert [point.value for _, point in meter.points("b2g.queue.depth")] == [5]
    assert [point.value for _, point in meter.points("b2g.flight.in_use")] == [2]


def test_a_failed_flight_has_a_size_and_a_wait_and_no_cycle(meter: Meter) -> None:
    meter.instruments.flight_done(flight(4, 2_000_000, 30_000_000))
    meter.instruments.flight_done(flight(2, 0, 5, failed=True))
    (_, size), (_, wait), (_, cycle) = (
        meter.points(f"b2g.batch.{name}")[0] for name in ("size", "formation_wait", "cycle_time")
    )
    assert (size.count, size.sum) == (2, 6)
    assert (wait.count, wait.sum) == (2, 0.002)
    assert (cycle.count, cycle.sum) == (1, 0.03)
    assert size.bucket_counts[BATCH_SIZE_BOUNDS.index(2)] == size.bucket_counts[BATCH_SIZE_BOUNDS.index(4)] == 1
    assert cycle.bucket_counts[DURATION_BOUNDS_S.index(0.03)] == 1


def test_a_window_counts_once_for_each_execution_and_keeps_the_sign_of_d(meter: Meter) -> None:
    async def record() -> None:
        await meter.instruments.record(Window(4, 100, 100 * 3_000_000, 100 * 5_000_000))
        await meter.instruments.record(Window(4, 50, 50 * 3_000_000, 50 * 2_000_000))

    asyncio.run(record())
    ((_, service),) = meter.points("b2g.batch.service_time")
    assert (service.count, service.sum) == (150, pytest.approx(0.45))
    overhead = {attributes["b2g.sign"]: point for attributes, point in meter.points("b2g.batch.transport_overhead")}
    assert {sign: (point.count, pytest.approx(point.sum)) for sign, point in overhead.items()} == {
        "positive": (100, 0.2),
        "negative": (50, 0.05),
    }


def test_boundaries() -> None:
    assert (DURATION_BOUNDS_S[0], DURATION_BOUNDS_S[-1]) == (0.0001, 10.0)
    steps = [after / before for before, after in pairwise(DURATION_BOUNDS_S)]
    assert 1 < min(steps) <= max(steps) < 5 / 3 + 1e-9
    steps = [after / before for before, after in pairwise(BATCH_SIZE_BOUNDS[7:20])]
    assert 1 < min(steps) <= max(steps) <= 1.25
    assert BATCH_SIZE_BOUNDS[:8] == tuple(range(1, 9))


def test_the_documentation_has_this_table() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = text.partition("<!-- instruments -->")[2].partition("<!-- end -->")[0].strip().splitlines()
    assert table[0] == "| name | unit | kind | attributes | meaning |"
    assert table[2:] == [
        f"| `{it.name}` | `{it.unit}` | {it.kind} | {', '.join(f'`{name}`' for name in it.attributes)} | {it.meaning} |"
        for it in INSTRUMENTS
    ]
    for named in (*Skip, *Outcome):
        assert re.search(rf"\b{named}\b", text), f"docs/metrics.md does not name {named}"


def test_a_collectors_address() -> None:
    assert parse_otlp_url("http://c:4318") == parse_otlp_url("http://c:4318/") == "http://c:4318/v1/metrics"
    assert parse_otlp_url("https://c/otlp/v1/metrics?key=1") == "https://c/otlp/v1/metrics?key=1"
    for text in ("c:4318", "grpc://c:4317", "http://", "http://c:x", "http://c:0", "", "http://[::1"):
        with pytest.raises(UsageError, match="--otlp"):
            parse_otlp_url(text)


def test_a_server_that_does_not_answer_is_an_absent_reading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 1):
            control = ControlPlane("127.0.0.1", port)
            poller = ServicePoller(control, "m", interval_s=0.05)
            asyncio.run(poller.read())
            control.close()
            assert poller.skipped == {Skip.UNREADABLE: 1}


# before a fake server


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer.start(FakeScript((MODEL,))) as server:
        yield server


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportMetricsServiceRequest]]]:
    """A receiver of OTLP, and what it has received."""
    received: list[ExportMetricsServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                received.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def metrics_of(message: ExportMetricsServiceRequest) -> dict[str, Any]:
    (of_resource,) = message.resource_metrics
    resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert resource["service.name"] == "b2g-proxy"
    (of_scope,) = of_resource.scope_metrics
    return {metric.name: metric for metric in of_scope.metrics}


def test_a_collector_gets_all_ten_and_the_last_of_them_at_the_end(fake: FakeServer) -> None:
    with collector() as (url, received):

        async def serve() -> None:
            export = Export(otlp_url=parse_otlp_url(url), otlp_interval_s=0.2, poll_s=0.1)
            async with watched(fake, export) as it:
                async with load(it, 12):
                    while not received or set(metrics_of(received[-1])) != NAMES:
                        await asyncio.sleep(0.05)
                await it.proxy.drain(10)
                ends.append(it.proxy.snapshot())

        ends: list[Snapshot] = []
        run(serve())
    (snapshot,) = ends
    metrics = metrics_of(received[-1])
    assert set(metrics) == NAMES
    ended = {
        {each.key: each.value.string_value for each in point.attributes}["b2g.outcome"]: point.as_int
        for point in metrics["b2g.request.ended"].sum.data_points
    }
    assert ended == {str(outcome): count for outcome, count in snapshot.outcomes.items()}
    assert sum(point.count for point in metrics["b2g.batch.size"].histogram.data_points) == snapshot.flights
    service = metrics["b2g.batch.service_time"].histogram.data_points
    assert sum(point.sum for point in service) / sum(point.count for point in service) >= 0.002


def test_a_port_in_use(fake: FakeServer) -> None:
    async def serve(port: int) -> None:
        async with watched(fake, Export(port=port)):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(SetupError, match="cannot offer metrics"):
            run(serve(taken.getsockname()[1]))
        with pytest.raises(SetupError, match="cannot offer metrics"):
            run(serve(70_000))


def test_the_command_offers_metrics_that_agree_with_its_counts(fake: FakeServer) -> None:
    with served(fake.address, "m", "-k", "2", "-M", "2", "--json", "--metrics-port", "0") as it:
        url = json.loads(it.first)["metrics"]
        assert url.startswith("http://127.0.0.1:")
        with it.client() as client:
            for _ in range(3):
                client.infer("m", {"x": np.zeros(64, "<f4")})
        text = fetch(url)
        common = 'b2g_model="m",b2g_placement="C4",b2g_transport="http"'
        assert f'b2g_request_ended_total{{b2g_model="m",b2g_outcome="answered",{common[14:]}}} 3.0' in text
        assert f'b2g_network_io_bytes_total{{{common},network_io_direction="receive"}} 768.0' in text
        code, _, errors = it.stop()
        assert (code, errors) == (0, "")


def test_a_collector_that_is_not_there_does_not_keep_the_command(fake: FakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with served(fake.address, "m", "--placement", "C1", "--otlp", nowhere) as it:
        with it.client() as client:
            client.infer("m", {"x": np.zeros(64, "<f4")})
        code, said, _ = it.stop()
        assert (code, "1 answered" in said) == (0, True)
