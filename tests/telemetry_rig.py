"""A proxy with its telemetry before a fake server, and load on it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from b2gmodel.batcher import Policy
from b2gmodel.live.client import AsyncClient
from b2gmodel.live.exporters import Export, Telemetry, telemetry
from b2gmodel.live.fake import Delays, FakeModel, FakeServer, FakeTensor
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.proxy import Proxy
from b2gmodel.live.telemetry import Labels
from b2gmodel.live.transport import HttpTransport

MODEL = FakeModel("m", inputs=(FakeTensor("x", "FP32", (64,)),), delays=Delays(compute_infer_base_ns=2_000_000))
LABELS = Labels("m", "C4", "http")


@dataclass
class Watched:
    proxy: Proxy
    address: tuple[str, int]
    telemetry: Telemetry


@asynccontextmanager
async def watched(fake: FakeServer, export: Export) -> AsyncIterator[Watched]:
    """A proxy with k = 4 and M = 2, and its telemetry."""
    host, port = fake.address.split(":")
    lookup = ControlPlane(host, int(port))
    model = await lookup.model("m", {})
    lookup.close()
    transport = HttpTransport(host, int(port), model)
    proxy = Proxy(model, Policy(4, 2, 32, 2_000_000), transport, run_id="t")
    try:
        async with telemetry(proxy, LABELS, export, ControlPlane(host, int(port))) as running:
            yield Watched(proxy, await proxy.start("127.0.0.1", 0), running)
            await proxy.aclose()
    finally:
        await proxy.aclose()
        await transport.aclose()


@asynccontextmanager
async def load(it: Watched, workers: int) -> AsyncIterator[None]:
    """Requests one after another from each of the workers, as long as the context lasts."""
    payload = np.zeros(64, "<f4")

    async def work(client: AsyncClient) -> None:
        while True:
            await client.infer("m", {"x": payload})

    async with AsyncClient(*it.address) as client:
        tasks = [asyncio.create_task(work(client)) for _ in range(workers)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()
