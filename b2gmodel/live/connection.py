"""One client's connection at the proxy: frames in, into the pool's slots; answers out, gathered.

Rules that hold here:

* A payload is received straight into its slot and sent from there; a result is written from the memory that it
  was received into. (On uvloop, writes are gathered; asyncio's own loop copies what the socket does not take.)
* Each request ends once. Its slot goes back when no flight uses it any longer, be its client answered or gone.
* A client is read only while it holds fewer slots than its budget and takes its answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, cast

from b2gmodel.batcher import RefusalReason
from b2gmodel.errors import B2GError, ServerError
from b2gmodel.live.contract import Contract
from b2gmodel.live.gateway import ExpiredError, Gateway, RefusedError
from b2gmodel.live.observer import Outcome
from b2gmodel.live.pool import BufferPool, Slot
from b2gmodel.live.tensors import Result
from b2gmodel.live.wire import (
    FROM_CLIENT,
    Buffer,
    Cancel,
    ErrorCode,
    Failure,
    Frame,
    FrameReader,
    Request,
    WireError,
    encode,
)
from b2gmodel.live.wire import Result as WireResult

_REFUSALS: Final = {
    RefusalReason.QUEUE_FULL: (ErrorCode.BUSY, "the proxy's queue is full"),
    RefusalReason.DRAINING: (ErrorCode.DRAINING, "the proxy is shutting down"),
    RefusalReason.DEADLINE: (ErrorCode.DEADLINE, "the deadline passed while the request was received"),
    RefusalReason.DUPLICATE: (ErrorCode.INTERNAL, "the proxy took one number for two requests"),
}
_OUTCOMES: Final = {
    ErrorCode.BUSY: Outcome.BUSY,
    ErrorCode.DEADLINE: Outcome.DEADLINE,
    ErrorCode.MALFORMED: Outcome.MALFORMED,
    ErrorCode.UPSTREAM: Outcome.UPSTREAM,
    ErrorCode.DRAINING: Outcome.DRAINING,
    ErrorCode.REFUSED: Outcome.REFUSED,
    ErrorCode.CANCELLED: Outcome.CANCELLED,
    ErrorCode.INTERNAL: Outcome.INTERNAL,
}
_DISCARD: Final = memoryview(bytearray(64 * 1024))


class Host(Protocol):
    """The proxy, as its connections see it."""

    contract: Contract
    pool: BufferPool
    gateway: Gateway
    draining: bool
    client_requests: int
    linger_s: float

    def joined(self, connection: Connection) -> str | None:
        """A client has connected; the reason why it has to leave, where it has."""
        ...

    def left(self, connection: Connection) -> None: ...

    def received(self) -> None:
        """The head of one more request is there."""
        ...

    def ended(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        """A request has ended."""
        ...

    def broke_protocol(self) -> None: ...

    def unread(self) -> None:
        """A client has been sent more while it does not read."""
        ...


@dataclass(slots=True, eq=False)
class _Open:
    """A request that holds a slot; ``answered`` once its client has its answer, or is gone."""

    request_id: int
    payload_bytes: int
    slot: Slot
    deadline_ns: int | None
    timer: asyncio.TimerHandle | None = None
    number: int | None = None  # at the gateway, once received whole
    answered: bool = False


class Connection(asyncio.BufferedProtocol):
    """Serves one client. Made by the listening server; ``leave`` and ``abort`` end it from the proxy's side."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reader = FrameReader(self._allocate, accepts=FROM_CLIENT, limits=host.contract.limits)
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Open] = {}
        self._incoming: _Open | None = None  # whose payload is being received; None where it is discarded
        self._held = 0
        self._reading_paused = self._writing_paused = self._leaving = False
        self._mid_frame: tuple[int, float] | None = None
        self._frames = 0
        self._aborted = False
        self._active_s = self._loop.time()
        self.stalled_since_s: float | None = None
        self.left_s: float | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        reason = self._host.joined(self)
        if reason is not None:
            self.leave(ErrorCode.BUSY, reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _DISCARD if self._leaving else self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self._leaving:
            self._take_in(nbytes)

    def eof_received(self) -> None:
        # A client that will send no more withdraws what it has open; the transport closes after this.
        if self._leaving:
            return
        try:
            self._reader.finish()
        except WireError as error:
            self._write(encode(Failure(None, error.code, error.message)))
        self._leaving = True
        self._give_up_all(Outcome.DISCONNECTED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leaving = True
        self._give_up_all(Outcome.DISCONNECTED)
        self._host.left(self)

    def pause_writing(self) -> None:
        self._writing_paused = True
        self.stalled_since_s = self._loop.time()
        self._set_reading()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self.stalled_since_s = None
        self._set_reading()

    # the proxy's side

    @property
    def unsent_bytes(self) -> int:
        """Answers that the client has not taken yet."""
        return self._transport.get_write_buffer_size() if self._writing_paused and not self._aborted else 0

    @property
    def open_requests(self) -> int:
        """Requests without an answer."""
        return len(self._open)

    @property
    def idle_since_s(self) -> float | None:
        """Since when (loop time) nothing has come in; None while a request is open."""
        return None if self._open else self._active_s

    def leave(self, code: ErrorCode, reason: str) -> None:
        """Tell the client that all it has open ends so, then close; what it still sends is read and dropped."""
        if self._leaving:
            return
        self._write(encode(Failure(None, code, reason)))
        self._close_softly(_OUTCOMES[code])

    def abort(self) -> None:
        """Cut the connection off, answers not yet taken included."""
        self._aborted = True
        self._transport.abort()

    def frame_begun_s(self, now_s: float) -> float | None:
        """By when (loop time) the frame that is being received had begun; None between frames. Call it regularly.

        It is known as of the first call that sees the frame unfinished: receiving costs nothing for it.
        """
        if self._leaving or self._reading_paused:  # a frame that we do not read is not late
            self._mid_frame = None
            return None
        try:
            self._reader.finish()
        except WireError:
            if self._mid_frame is None or self._mid_frame[0] != self._frames:
                self._mid_frame = (self._frames, now_s)
            return self._mid_frame[1]
        return None

    def break_off(self, reason: str) -> None:
        """End the connection as one that does not keep to the protocol."""
        if not self._leaving:
            self._end_malformed(WireError(reason))

    # a request's way

    def _take_in(self, nbytes: int) -> None:
        self._active_s = self._loop.time()
        try:
            for frame in self._reader.received(nbytes):
                self._frames += 1
                self._take(frame)
                if self._leaving or self._is_full():
                    break  # what was received together with this frame is kept in the reader until there is room
        except WireError as error:
            self._end_malformed(error)
        self._set_reading()

    def _allocate(self, head: Request | WireResult) -> memoryview | None:
        """The slot for a request's payload; None, with its failure on the way, where it is not taken."""
        assert isinstance(head, Request)
        host, now_ns = self._host, time.monotonic_ns()
        if head.request_id in self._open:
            raise WireError("request id is in use", observed=head.request_id, allowed="an id not used before")
        host.received()
        self._incoming = None
        objection = host.contract.objection(head)
        if objection is not None:
            self._refuse(head, ErrorCode.REFUSED, objection)
            return None
        if host.draining:
            self._refuse(head, *_REFUSALS[RefusalReason.DRAINING])
            return None
        slot = host.pool.take()
        if slot is None:
            self._refuse(head, *_REFUSALS[RefusalReason.QUEUE_FULL])
            return None
        deadline_ns = None if head.deadline_ns is None else now_ns + head.deadline_ns
        entry = _Open(head.request_id, head.payload_bytes, slot, deadline_ns)
        self._open[head.request_id] = self._incoming = entry
        self._held += 1
        if head.deadline_ns is not None:
            entry.timer = self._loop.call_later(head.deadline_ns / 1e9, self._deadline_came, entry)
        return slot.view[: head.payload_bytes]

    def _refuse(self, head: Request, code: ErrorCode, reason: str) -> None:
        self._write(encode(Failure(head.request_id, code, reason)))
        self._host.ended(_OUTCOMES[code], head.payload_bytes, 0)

    def _take(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Cancel):
            entry = self._open.get(message.request_id)
            if entry is not None:
                self._give_up(entry, ErrorCode.CANCELLED, "withdrawn by the client")
            return
        assert isinstance(message, Request)
        entry, self._incoming = self._incoming, None
        if entry is None:
            return
        if entry.answered:  # its deadline came while it was received
            self._free(entry)
            return
        payload = self._host.contract.inputs(message, entry.slot.view)
        entry.number = self._host.gateway.begin(payload, entry.deadline_ns, partial(self._over, entry))

    def _over(self, entry: _Open, outcome: Result | B2GError | None) -> None:
        """The gateway is done with a request: its slot is free, and its client hears of it, unless it has."""
        self._free(entry)
        if entry.answered:
            return
        match outcome:
            case RefusedError(reason=reason):
                self._fail(entry, *_REFUSALS[reason])
            case ExpiredError():
                self._fail(entry, ErrorCode.DEADLINE, "the deadline passed while the request waited")
            case ServerError():
                self._fail(entry, ErrorCode.UPSTREAM, outcome.line())
            case B2GError() | None:
                self._fail(entry, ErrorCode.INTERNAL, "the proxy broke the request off")
            case _:
                self._answer(entry, outcome)

    def _answer(self, entry: _Open, result: Result) -> None:
        try:
            frame, payload_bytes = self._host.contract.result_frame(entry.request_id, result)
        except ServerError as error:
            self._fail(entry, ErrorCode.UPSTREAM, error.line())
            return
        self._settle(entry, Outcome.ANSWERED, payload_bytes)
        self._write(frame)

    def _fail(self, entry: _Open, code: ErrorCode, reason: str) -> None:
        self._settle(entry, _OUTCOMES[code])
        self._write(encode(Failure(entry.request_id, code, reason)))

    def _give_up(self, entry: _Open, code: ErrorCode, reason: str) -> None:
        """Answer a request now, though a flight may still carry it."""
        self._fail(entry, code, reason)
        if entry.number is not None:
            self._host.gateway.cancel(entry.number)

    def _deadline_came(self, entry: _Open) -> None:
        assert entry.deadline_ns is not None
        left_ns = entry.deadline_ns - time.monotonic_ns()
        if left_ns > 0:  # a loop's timers are coarser than the clock, and may ring early
            entry.timer = self._loop.call_later(left_ns / 1e9, self._deadline_came, entry)
        else:
            self._give_up(entry, ErrorCode.DEADLINE, "the deadline passed before the result was there")

    def _settle(self, entry: _Open, outcome: Outcome, bytes_out: int = 0) -> None:
        entry.answered = True
        del self._open[entry.request_id]
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        self._host.ended(outcome, entry.payload_bytes, bytes_out)

    def _free(self, entry: _Open) -> None:
        self._host.pool.release(entry.slot)
        self._held -= 1
        self._set_reading()

    def _give_up_all(self, outcome: Outcome) -> None:
        """Every open request ends, without an answer of its own."""
        for entry in list(self._open.values()):
            self._settle(entry, outcome)
            if entry.number is not None:
                self._host.gateway.cancel(entry.number)
        if self._incoming is not None:
            entry, self._incoming = self._incoming, None
            self._free(entry)

    # reading and writing

    def _set_reading(self) -> None:
        """Read on, or not, by the client's budget and by whether it takes its answers."""
        full = not self._leaving and self._is_full()
        if full == self._reading_paused or self._transport.is_closing():
            return
        self._reading_paused = full
        if full:
            self._transport.pause_reading()
        else:
            # Later, because this may be the middle of the gateway's work: frames at hand would run into it.
            self._loop.call_soon(self._read_on)

    def _is_full(self) -> bool:
        return self._writing_paused or self._held >= self._host.client_requests

    def _read_on(self) -> None:
        if self._reading_paused or self._transport.is_closing():
            return
        self._transport.resume_reading()
        if not self._leaving:
            self._take_in(0)

    def _write(self, frame: Sequence[Buffer]) -> None:
        if self._leaving or self._transport.is_closing():
            return
        self._transport.writelines(frame)
        if self._writing_paused:
            self._host.unread()

    def _end_malformed(self, error: WireError) -> None:
        """Say what is wrong, to the request concerned and to all others that end with it."""
        self._host.broke_protocol()
        # An id that is open is another request's: it gets the answer to all.
        concerned = None if error.request_id in self._open else error.request_id
        self._write(encode(Failure(concerned, error.code, error.message)))
        if concerned is not None and self._open:
            self._write(encode(Failure(None, error.code, "the connection ended with a malformed frame")))
        self._close_softly(Outcome.MALFORMED)

    def _close_softly(self, outcome: Outcome) -> None:
        """Close once the client has had time to read: closing on unread bytes would throw our last answer away."""
        self._leaving = True
        self.left_s = self._loop.time()
        self._give_up_all(outcome)
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._set_reading()
        self._loop.call_later(self._host.linger_s, self._transport.close)
