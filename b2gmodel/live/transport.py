"""How a batch gets to the inference server. One interface; the transports differ in what they copy and where.

A transport carries several batches at once, each on a channel of its own, and stamps its stages.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from b2gmodel.flights import ExchangeTimes
from b2gmodel.live.http_pool import HttpPool
from b2gmodel.live.infer import InferMessage, Payload
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.tensors import Result

__all__ = ["Delivery", "HttpTransport", "Payload", "Transport", "ordinary_memory"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch's results, one a request in the order of the batch, and when its stages were passed."""

    results: tuple[Result, ...]
    times: ExchangeTimes


class Transport(Protocol):
    """Carries batches of one model to its server."""

    @property
    def name(self) -> str:
        """As ``--transport`` and the records spell it."""
        ...

    def payload_memory(self, nbytes: int) -> memoryview:
        """Writable memory from which payloads travel best, page-aligned, zeroed, already backed by pages.

        Batches of several inputs travel best with the rows of each input side by side in an area of its own.
        It can be used until the transport is closed. Raises ``SetupError`` where there is not so much.
        """
        ...

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        """Send a batch, wait for its results.

        Args:
            batch_id: goes to the server, and has to come back from it.
            payloads: from any memory; they must not change meanwhile.

        Raises:
            ServerError: the server fails, or answers what does not fit the batch.
            UsageError: a payload does not fit the model.
        """
        ...

    async def warm(self, channels: int) -> None:
        """Open channels ahead of need, so that no batch pays for it."""
        ...

    async def aclose(self) -> None: ...


class HttpTransport:
    """The binary tensor protocol over HTTP/1.1: the payloads' own buffers are gathered onto the socket."""

    name = "http"

    def __init__(self, host: str, port: int, model: ModelSpec) -> None:
        self._model = model
        self._pool = HttpPool(host, port)
        self._messages: dict[int, InferMessage] = {}

    def payload_memory(self, nbytes: int) -> memoryview:
        return ordinary_memory(nbytes)

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        k = len(payloads)
        if k not in self._messages:
            self._messages[k] = InferMessage(self._model, k)
        message = self._messages[k]
        headers, body = message.encode(batch_id, payloads)
        response = await self._pool.request("POST", message.target, headers=headers, body=body)
        return Delivery(message.decode(batch_id, response), response.times)

    async def warm(self, channels: int) -> None:
        await self._pool.warm(channels)

    async def aclose(self) -> None:
        self._pool.close()


def ordinary_memory(nbytes: int) -> memoryview:
    """Page-aligned memory of this process, its pages there already: the first use of a fresh one is slow."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, max(1, nbytes), flags=flags))[:nbytes]
