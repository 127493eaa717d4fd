"""One asyncio connection to the proxy: calls go out in turn, answers come back in any order.

Rules of this module: frames are sent by a task of their own, so that a cancelled call can never leave half a
frame on the wire; a call ends once, with its answer or with the reason why there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np

from b2gmodel.live.outcomes import Peer, RequestError
from b2gmodel.live.stream import Stream
from b2gmodel.live.wire import (
    FROM_PROXY,
    Buffer,
    Cancel,
    Failure,
    Frame,
    FrameReader,
    Request,
    Result,
    WireError,
    encode,
)


def fresh(head: Request | Result) -> memoryview:
    """New memory for a payload."""
    # numpy's memory, unlike a bytearray's, is not zeroed first: each page is touched once, by the kernel.
    return np.empty(head.payload_bytes, np.uint8).data


def id_of(frame: Frame) -> int | None:
    """The request that a frame concerns; None for the whole connection."""
    return frame.message.request_id


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way: its frame, whether any of it was sent, and where its answer goes."""

    request_id: int
    buffers: list[Buffer]
    answer: asyncio.Future[Frame]
    begun: bool = False


@dataclass(slots=True, eq=False)
class Link:
    """A connection, which it owns, with a task that sends and one that receives."""

    stream: Stream
    peer: Peer
    ended: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)
    outbox: asyncio.Queue[_Call | Cancel] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.task = asyncio.create_task(self._serve())

    async def call(self, request_id: int, buffers: list[Buffer]) -> Frame:
        """The answer to a request. Cancelled, it withdraws the request."""
        if self.ended:
            raise self.peer.lost("it ended before the request was sent")
        call = _Call(request_id, buffers, asyncio.get_running_loop().create_future())
        self.calls[request_id] = call
        self.outbox.put_nowait(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if self.calls.pop(request_id, None) is not None and call.begun:
                self.withdrawn.add(request_id)
                self.outbox.put_nowait(Cancel(request_id))
            raise

    async def aclose(self) -> None:
        """End both tasks and close the connection."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]
        reason: BaseException | None = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            reason = next(filter(None, (task.exception() for task in done)))
        finally:
            self.ended = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.stream.close()
            self._fail_all(reason)

    async def _send(self) -> None:
        # A proxy that refuses in mid-frame may close: its reason can still be received, and ends the link.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                item = await self.outbox.get()
                if isinstance(item, Cancel):
                    await self.stream.send(encode(item))
                elif not item.answer.done():
                    item.begun = True
                    await self.stream.send(item.buffers)

    async def _receive(self) -> None:
        reader = FrameReader(self._destination, accepts=FROM_PROXY, limits=self.peer.limits)
        while True:
            count = await self.stream.receive_into(reader.get_buffer())
            if count == 0:
                reader.finish()
                raise self.peer.lost("the proxy closed it")
            for frame in reader.received(count):
                self._deliver(frame)

    def _destination(self, head: Request | Result) -> memoryview | None:
        return fresh(head) if head.request_id in self.calls else None

    def _deliver(self, frame: Frame) -> None:
        request_id = id_of(frame)
        if request_id is None and isinstance(frame.message, Failure):
            raise self.peer.failed(frame.message)
        if request_id in self.withdrawn:
            self.withdrawn.discard(request_id)
        elif request_id in self.calls:
            answer = self.calls.pop(request_id).answer
            if not answer.done():
                answer.set_result(frame)
        else:
            raise WireError("answer to no open request", observed=request_id, where="request_id")

    def _fail_all(self, reason: BaseException | None) -> None:
        """Every open call ends: with the proxy's own reason where it gave one, else as a lost connection."""
        calls, self.calls = self.calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(self._error(reason))

    def _error(self, reason: BaseException | None) -> RequestError:
        if isinstance(reason, RequestError):
            # Each call gets an exception of its own: a shared one would collect all their tracebacks.
            return type(reason)(reason.problem, where=reason.where, hint=reason.hint)
        error = self.peer.lost(reason or "the client was closed")
        error.__cause__ = reason
        return error
