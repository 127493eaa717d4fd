"""One connection of a load to its proxy: it carries one request at a time, and tells its owner what becomes of it.

Rules of this module: payloads are sent from where they lie; a request costs its frame's head and two callbacks,
with no task of its own; results go into memory that is used again, or nowhere where nobody looks at them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol, cast

from b2gmodel.live.wire import FROM_PROXY, Buffer, Failure, Frame, FrameReader, Request, Result, WireError


@dataclass(frozen=True, slots=True)
class LoadPayload:
    """One request's inputs, and what a reference workload answers to them (None where nobody asks)."""

    parts: tuple[memoryview, ...]
    fingerprint: bytes | None


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request on its way, and from when its latency counts."""

    request_id: int
    intended_ns: int


class LaneOwner(Protocol):
    """The generator, as its lanes see it."""

    def joined(self, lane: Lane) -> None:
        """The lane is connected."""
        ...

    def answered(self, lane: Lane, done: OpenRequest, frame: Frame, now_ns: int) -> None:
        """The lane's request has its answer, and the lane is free."""
        ...

    def lost(self, lane: Lane, reason: str) -> None:
        """The lane's connection has ended, perhaps with a request open."""
        ...


class Lane(asyncio.BufferedProtocol):
    """One connection.

    Args:
        number: its number, which a later connection in its place has, too.
        payload: of all its requests.
        owner: told of what happens.
    """

    def __init__(self, number: int, payload: LoadPayload, owner: LaneOwner) -> None:
        self.number = number
        self.payload = payload
        self.open: OpenRequest | None = None
        self._owner = owner
        self._reason = "the proxy closed it"
        self._results = bytearray()
        self._reader = FrameReader(self._destination, accepts=FROM_PROXY)

    def send(self, request: OpenRequest, frame: list[Buffer]) -> None:
        """Send a request. The lane must be free."""
        self.open = request
        self._transport.writelines(frame)

    def abort(self) -> None:
        """Cut the connection off."""
        self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.joined(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        now_ns = time.monotonic_ns()
        try:
            for frame in self._reader.received(nbytes):
                self._take(frame, now_ns)
        except WireError as error:
            self._reason = error.message
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self, self._reason if exc is None else str(exc))

    def _destination(self, head: Request | Result) -> memoryview | None:
        if self.payload.fingerprint is None:
            return None
        if len(self._results) < head.payload_bytes:
            self._results = bytearray(head.payload_bytes)
        return memoryview(self._results)[: head.payload_bytes]

    def _take(self, frame: Frame, now_ns: int) -> None:
        message = frame.message
        if isinstance(message, Failure) and message.request_id is None:
            # It ends the connection. Whether the proxy had read the head of what is open here is not known.
            self._reason = f"{message.code.name.lower()}: {message.message}"
            return
        if self.open is None or message.request_id != self.open.request_id:
            raise WireError("answer to no open request", observed=message.request_id, where="request_id")
        done, self.open = self.open, None
        self._owner.answered(self, done, frame, now_ns)
