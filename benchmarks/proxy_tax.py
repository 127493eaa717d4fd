"""What the proxy costs: D0 against C1, with where the time goes; and the bytes it moves against a bare forwarder.

    python benchmarks/proxy_tax.py [--seconds 3] [--rounds 5] [--no-tax]

Tax: c callers, one request of 588 KiB each, straight to the server over our own HTTP transport (D0) and through
the proxy passing requests on one by one (C1), by turns, against the real server's null entry where the embedded
server is installed. It is stated; it has no bar.

Bytes: c clients send 588 KiB requests as fast as they are answered, through the proxy (k = 8, M = 2) to a server
that swallows them, and through a forwarder of two sockets a client on the same loop to one that does the same.
Held where the proxy moves at least half of the forwarder's bytes a second, at the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from proxy_parts import (
    KIB,
    Loaded,
    Order,
    forwarder,
    http_sink,
    null_model,
    process,
    proxy,
    raw_load,
    raw_sink,
    wire_load,
)

from b2gmodel.batcher import Policy
from b2gmodel.live.kserve import ControlPlane, ModelSpec

PAYLOAD_BYTES = 588 * KIB
BAR = 0.5
CLIENTS = (1, 16, 100)
MOVERS = 32


def main() -> int:
    options = _options()
    if not options.no_tax:
        with _server() as (what, address, model):
            print(f"tax at 588 KiB against {what}; medians, ms")
            for c in CLIENTS:
                _tax(address, model, c, options.seconds, options.rounds)
    ratios = _bytes_moved(options.seconds, options.rounds)
    value = statistics.median(ratios)
    held = value >= BAR
    print(
        json.dumps(
            {
                "name": "proxy_tax",
                "value": round(value, 3),
                "bar": f">= {BAR}",
                "held": held,
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
    )
    return 0 if held else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-tax", action="store_true", help="only the bytes moved")
    return parser.parse_args()


@contextmanager
def _server() -> Iterator[tuple[str, tuple[str, int], ModelSpec]]:
    """The real server's null entry; without the wheel, the sink."""
    if find_spec("pytriton") is None:
        with process(http_sink) as sink:
            yield "a server that swallows (no embedded server installed)", sink.recv(), null_model(PAYLOAD_BYTES)
        return
    from b2gmodel.live.server import EmbeddedServer
    from b2gmodel.live.workloads import Role, load_workloads

    table = load_workloads()
    with EmbeddedServer.start(table, models=("resnet50",)) as server:
        name = table["resnet50"].model_name(Role.NULL)

        async def describe() -> ModelSpec:
            control = ControlPlane(*server.http_address)
            try:
                return await control.model(name, {})
            finally:
                control.close()

        yield f"Triton {server.version}, {name}", server.http_address, asyncio.run(describe())


def direct_load(pipe: Connection, address: tuple[str, int], model: ModelSpec) -> None:
    """D0: callers on the HTTP transport itself, for each (c, seconds) that comes."""
    _async_load(pipe, address, model, through_proxy=False)


def proxied_load(pipe: Connection, address: tuple[str, int], model: ModelSpec) -> None:
    """C1: callers on the package's own client, a connection each."""
    _async_load(pipe, address, model, through_proxy=True)


def _async_load(pipe: Connection, address: tuple[str, int], model: ModelSpec, *, through_proxy: bool) -> None:
    import numpy as np

    from b2gmodel.live.arrays import Tensor
    from b2gmodel.live.client import AsyncClient
    from b2gmodel.live.messages import Datatype
    from b2gmodel.live.payloads import make_payloads
    from b2gmodel.live.run_loop import run_loop
    from b2gmodel.live.transport import HttpTransport

    async def drive(c: int, seconds: float) -> Loaded:
        latencies_s: list[float] = []
        begin_s = time.monotonic() + seconds / 4
        transport = HttpTransport(*address, model)
        payloads = make_payloads(model, min(c, 8), transport)
        clients = [AsyncClient(*address) for _ in range(c)] if through_proxy else []

        async def caller(index: int) -> None:
            payload = payloads[index % len(payloads)]
            inputs = {
                spec.name: Tensor(Datatype[spec.datatype], spec.shape, np.frombuffer(part, np.uint8).data)
                for spec, part in zip(model.inputs, payload, strict=True)
            }
            while True:
                sent_s = time.monotonic()
                if through_proxy:
                    await clients[index].infer(model.name, inputs)
                else:
                    await transport.infer("d0", [payload])
                done_s = time.monotonic()
                if done_s >= begin_s + seconds:
                    return
                if done_s >= begin_s:
                    latencies_s.append(done_s - sent_s)

        await asyncio.gather(*(caller(index) for index in range(c)))
        await transport.aclose()
        for client in clients:
            await client.aclose()
        return Loaded(len(latencies_s), seconds, latencies_s)

    while True:
        pipe.send(run_loop(drive(*pipe.recv())))


def _tax(address: tuple[str, int], model: ModelSpec, c: int, seconds: float, rounds: int) -> None:
    """D0 and C1 by turns, a row each, and C1's stages."""
    policy = Policy(batch_size=1, flights=c, queue_limit=max(c, 8))
    seen: dict[str, list[Loaded]] = {"D0": [], "C1": []}
    flights: list[Any] = []
    spent_s = [0.0, 0.0]
    with process(proxy, address, model, policy) as served:
        place = served.recv()
        with process(direct_load, address, model) as direct, process(proxied_load, place, model) as proxied:
            for _ in range(rounds):
                for name, load in (("D0", direct), ("C1", proxied)):
                    before, _ = _ask(served)
                    load.send((c, seconds))
                    seen[name].append(load.recv())
                    after, ended = _ask(served)
                    if name == "C1":
                        flights += ended
                        spent_s = [a + now - then for a, now, then in zip(spent_s, after, before, strict=True)]
    rates = {name: [each.requests / each.seconds for each in runs] for name, runs in seen.items()}
    ratios = [c1 / d0 for d0, c1 in zip(rates["D0"], rates["C1"], strict=True)]
    medians = {name: _median_ms([one for each in runs for one in each.latencies_s]) for name, runs in seen.items()}
    for name in seen:
        print(f"  c = {c:<3}  {name}  {statistics.median(rates[name]):7.1f} request/s  latency {medians[name]:7.2f}")
    print(
        f"           C1 / D0 throughput {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"latency + {medians['C1'] - medians['D0']:.2f}"
    )
    print(f"           C1's latency: {_stages(flights, medians['C1'])}")
    count = len(flights)
    print(
        f"           proxy's CPU a request: {spent_s[0] / count * 1e3:.2f} user + {spent_s[1] / count * 1e3:.2f} system"
    )


def _stages(flights: Sequence[Any], latency_ms: float) -> str:
    """Medians of what the proxy stamps; the rest lies before the request was whole and after it was delivered."""
    whole = [flight for flight in flights if flight.times.response_end_ns is not None]
    legs = {
        "wait": [f.sealed_ns - f.oldest_arrival_ns for f in whole],
        "pack": [f.times.send_begin_ns - f.sealed_ns for f in whole],
        "send": [f.times.send_end_ns - f.times.send_begin_ns for f in whole],
        "server": [f.times.first_byte_ns - f.times.send_end_ns for f in whole],
        "return": [f.times.response_end_ns - f.times.first_byte_ns for f in whole],
        "deliver": [f.delivered_ns - f.times.response_end_ns for f in whole],
    }
    medians_ms = {name: statistics.median(values) / 1e6 for name, values in legs.items()}
    named = ", ".join(f"{name} {value:.2f}" for name, value in medians_ms.items())
    return f"{named}, client to proxy and back {latency_ms - sum(medians_ms.values()):.2f}"


def _ask(served: Connection) -> tuple[Any, Any]:
    served.send("report")
    answer: tuple[Any, Any] = served.recv()
    return answer


def _median_ms(values_s: Sequence[float]) -> float:
    return statistics.median(values_s) * 1e3


def _bytes_moved(seconds: float, rounds: int) -> list[float]:
    """Rounds of the proxy's bytes a second over the forwarder's, by turns."""
    ratios = []
    policy = Policy(batch_size=8, flights=2, queue_limit=256, formation_deadline_ns=5_000_000)
    with (
        process(http_sink) as sink,
        process(raw_sink, PAYLOAD_BYTES) as bare_sink,
        process(wire_load) as clients,
        process(raw_load) as bare_clients,
        process(proxy, sink.recv(), null_model(PAYLOAD_BYTES), policy) as served,
        process(forwarder, bare_sink.recv()) as bare,
    ):
        proxy_place, bare_place = served.recv(), bare.recv()
        print(f"bytes moved, {MOVERS} clients, MiB/s")
        for _ in range(rounds):
            rates = []
            for load, place in ((bare_clients, bare_place), (clients, proxy_place)):
                load.send(Order(place, MOVERS, PAYLOAD_BYTES, seconds, warm_s=seconds / 4))
                done = load.recv()
                rates.append(done.requests * PAYLOAD_BYTES / done.seconds / 2**20)
            ratios.append(rates[1] / rates[0])
            print(f"  forwarder {rates[0]:7.1f}  proxy {rates[1]:7.1f}  ratio {ratios[-1]:.3f}")
    return ratios


if __name__ == "__main__":
    sys.exit(main())
