"""No copies of payloads, no growth: what serving a request allocates, and the proxy's memory over many of them.

    python benchmarks/proxy_copies.py [--requests 10000]

The proxy runs in this process, the clients and a server that swallows in others. First as many requests as asked
for, of 588 KiB (so that it takes seconds): resident memory after a tenth of them, and after as many again. Then
4,800 KiB requests under tracemalloc, one at a time and in batches of eight: the most Python memory that stood
above the level before, a request.
Held where a request takes at most 16 KiB, and resident memory grows by at most 1 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tracemalloc
from multiprocessing.connection import Connection

from proxy_parts import KIB, Order, http_sink, null_model, process, resident_bytes, wire_load

from b2gmodel.batcher import Policy
from b2gmodel.flights import Flight
from b2gmodel.live.observer import Outcome
from b2gmodel.live.proxy import Proxy
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.transport import HttpTransport

BAR_BYTES = 16 * KIB
GROWTH_BAR_BYTES = 1024 * KIB
# So that the last requests of a load, too few for a batch, are sent; and so long that all others go in whole batches:
# a flight of few is charged with what the other flight in the air takes.
PATIENCE_NS = 1_000_000_000
LARGE_BYTES, SMALL_BYTES = 4800 * KIB, 588 * KIB


class Meter:
    """After each flight: the most traced memory since the flight before, above the level then, a request."""

    def __init__(self) -> None:
        self.peaks_bytes: list[float] = []
        self._level = tracemalloc.get_traced_memory()[0]

    def request_done(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        pass

    def flight_done(self, flight: Flight) -> None:
        now, peak = tracemalloc.get_traced_memory()
        self.peaks_bytes.append(max(0, peak - self._level) / flight.size)
        tracemalloc.reset_peak()
        self._level = now


async def measure(requests: int, sink: tuple[str, int], clients: Connection) -> tuple[list[float], int]:
    model = null_model(SMALL_BYTES)
    transport = HttpTransport(*sink, model)
    proxy = Proxy(model, Policy(8, 2, 16, PATIENCE_NS), transport, run_id="growth")
    place = await proxy.start("127.0.0.1", 0)
    await _load(clients, Order(place, 16, SMALL_BYTES, count=requests // 10))
    before = resident_bytes()
    await _load(clients, Order(place, 16, SMALL_BYTES, count=requests))
    after = resident_bytes()
    answered = proxy.snapshot().outcomes[Outcome.ANSWERED]
    print(
        f"  k = 8, 2 in flight, 588 KiB: resident {before / 2**20:.2f} MiB after {requests // 10} requests, "
        f"{after / 2**20:.2f} MiB after {answered}"
    )
    await proxy.aclose()
    await transport.aclose()
    peaks = []
    for k, flights, count in ((1, 1, 60), (8, 2, 320)):
        model = null_model(LARGE_BYTES)
        transport = HttpTransport(*sink, model)
        proxy = Proxy(model, Policy(k, flights, 16, PATIENCE_NS), transport, run_id="copies")
        place = await proxy.start("127.0.0.1", 0)
        await _load(clients, Order(place, k * flights, LARGE_BYTES, count=2 * k * flights))
        tracemalloc.start()
        meter = Meter()
        proxy.add_observer(meter)
        await _load(clients, Order(place, k * flights, LARGE_BYTES, count=count))
        tracemalloc.stop()
        peaks.append(max(meter.peaks_bytes[1:]))
        print(
            f"  k = {k}, {flights} in flight, 4,800 KiB: at most {peaks[-1] / KIB:.1f} KiB a request, median "
            f"{statistics.median(meter.peaks_bytes) / KIB:.1f}, over {len(meter.peaks_bytes)} flights"
        )
        await proxy.aclose()
        await transport.aclose()
    return peaks, after - before


async def _load(clients: Connection, order: Order) -> None:
    clients.send(order)
    await asyncio.get_running_loop().run_in_executor(None, clients.recv)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    requests = -(-parser.parse_args().requests // 160) * 160  # the same for each of 16 clients, tenths included
    with process(http_sink) as sink, process(wire_load) as clients:
        peaks, growth = run_loop(measure(requests, sink.recv(), clients))
    held = max(peaks) <= BAR_BYTES and growth <= GROWTH_BAR_BYTES
    print(
        json.dumps(
            {
                "name": "proxy_copies",
                "value": {"bytes_a_request": round(max(peaks)), "growth_bytes": growth, "requests": requests},
                "bar": f"<= {BAR_BYTES} bytes a request, growth <= {GROWTH_BAR_BYTES} bytes",
                "held": held,
                "spread": [round(min(peaks)), round(max(peaks))],
            }
        )
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
