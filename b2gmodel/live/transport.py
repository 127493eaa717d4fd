"""How a batch gets to the inference server. One interface; the transports differ in what they copy and where.

A transport carries several batches at once, each on a channel of its own, and stamps its stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from b2gmodel.live.http import Buffer, ExchangeTimes, HttpConnection
from b2gmodel.live.kserve import InferMessage, ModelSpec, Result

Payload = Sequence[Buffer]
"""One request's inputs: one buffer an input of the model, in the model's order."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch's results, one a request in the order of the batch, and when its stages were passed."""

    results: tuple[Result, ...]
    times: ExchangeTimes


class Transport(Protocol):
    """Carries batches of one model to its server."""

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        """Send a batch, wait for its results. Raises ``ServerError`` where the server fails."""
        ...

    async def warm(self, channels: int) -> None:
        """Open channels ahead of need, so that no batch pays for it."""
        ...

    async def aclose(self) -> None: ...


class HttpTransport:
    """The binary tensor protocol over HTTP/1.1: the payloads' own buffers are gathered onto the socket."""

    name = "http"

    def __init__(self, host: str, port: int, model: ModelSpec) -> None:
        self._host, self._port, self._model = host, port, model
        self._idle: list[HttpConnection] = []
        self._messages: dict[int, InferMessage] = {}

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        message = self._message(len(payloads))
        headers, body = message.encode(batch_id, payloads)
        connection = self._idle.pop() if self._idle else HttpConnection(self._host, self._port)
        try:
            response = await connection.request("POST", message.target, headers=headers, body=body)
            return Delivery(message.decode(batch_id, response), response.times)
        finally:
            self._idle.append(connection)

    async def warm(self, channels: int) -> None:
        self._idle.extend(HttpConnection(self._host, self._port) for _ in range(channels - len(self._idle)))
        for connection in self._idle:
            await connection.connect()

    async def aclose(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _message(self, k: int) -> InferMessage:
        if k not in self._messages:
            self._messages[k] = InferMessage(self._model, k)
        return self._messages[k]
