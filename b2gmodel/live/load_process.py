"""The process that sends a load: ``python -m b2gmodel.live.load_process``.

It learns its load from one line of JSON on stdin, and takes the end of stdin, which is also what it sees when
its parent is killed, as the order to end at once. On stdout it says one JSON object a line: ``progress``, then
``result`` or ``failed``.

Rules of this module: payloads are made before the first request and sent from where they lie; a request costs
a frame's head and two callbacks, with no task of its own; time is the monotonic clock, which a proxy on the
same machine shares.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from typing import Any, Final, cast

import numpy as np

from b2gmodel.errors import B2GError, UsageError
from b2gmodel.live.descriptors import allow_files
from b2gmodel.live.load import (
    CONNECT_S,
    ClosedLoop,
    LoadResult,
    LoadSpec,
    OpenLoop,
    event_to_json,
    spec_from_json,
)
from b2gmodel.live.load_lane import Lane, LoadPayload, OpenRequest
from b2gmodel.live.load_plan import ClosedPlan, OpenPlan, Plan, Send, intended_offsets
from b2gmodel.live.load_tally import LoadOutcome, Tally
from b2gmodel.live.load_timer import MonotonicTimer
from b2gmodel.live.payloads import fill_row
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.wire import (
    Buffer,
    ErrorCode,
    Failure,
    Frame,
    Request,
    Result,
    encode,
)
from b2gmodel.live.workloads import FINGERPRINT_BYTES, REAL_OUTPUT_NAME, fingerprint
from b2gmodel.units import ns_from_s, s_from_ns

_PAYLOADS_BYTES: Final = 256 * 1024 * 1024
_CONNECTING_AT_ONCE: Final = 64
_RECONNECT_S: Final = 0.25
_PROGRESS_S: Final = 0.5
_SPARE_FILES: Final = 64
# A client that was turned away asks again after this, not at once: that would load the proxy with refusals.
_PAUSE_NS: Final = 10_000_000


def main() -> int:
    """Send one load. Exit code 0 where it has a result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end is ours
    try:
        spec = spec_from_json(sys.stdin.buffer.readline())
        result = run_loop(_run(spec))
    except BrokenPipeError:
        return 1
    except B2GError as error:
        facts = {"observed": None if error.observed is None else str(error.observed), "allowed": error.allowed}
        _say(
            event="failed",
            type=type(error).__name__,
            problem=error.problem,
            where=error.where,
            hint=error.hint,
            **facts,
        )
        return 1
    except Exception as error:
        problem = f"the load generator failed ({type(error).__name__}: {error})"
        _say(event="failed", type="", problem=problem, observed=None, allowed=None, where=None, hint=None)
        return 1
    _say(event="result", result=result.to_dict())
    return 0


async def _run(spec: LoadSpec) -> LoadResult:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 1)  # nothing more comes but the end
    allow_files(spec.loop.connections + _SPARE_FILES, where="connections")
    return await Generator(spec).run()


class Generator:
    """Sends one load over its lanes, and tallies the answers."""

    def __init__(self, spec: LoadSpec) -> None:
        self._context = None if spec.tls is None else spec.tls.context()
        self.spec = spec
        self.payloads = _make_payloads(spec)
        self._loop = asyncio.get_running_loop()
        self._inputs = spec.wire_inputs
        self._deadline_ns = None if spec.deadline_s is None else max(1, ns_from_s(spec.deadline_s))
        self._lanes: dict[int, Lane] = {}
        self._reconnecting: set[asyncio.Task[None]] = set()
        self._timer = MonotonicTimer()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._unanswered = 0
        self._next_id = 1
        self._started = False
        self._plan: Plan
        self._tally: Tally

    async def run(self) -> LoadResult:
        """The result of the load, start to end.

        Raises:
            UsageError: the proxy is not there, or refuses these requests.
        """
        try:
            await self._connect_all()
            return await self._send_all()
        finally:
            self._finished.cancel()
            for task in self._reconnecting:
                task.cancel()
            for lane in self._lanes.values():
                lane.abort()
            self._loop.remove_reader(self._timer.fd)
            self._timer.close()

    # what the lanes tell

    def joined(self, lane: Lane) -> None:
        """The lane is connected."""
        self._lanes[lane.number] = lane
        if self._started:
            self._tally.reconnects += 1
            self._plan.free(lane.number, time.monotonic_ns())
            self._pump()

    def answered(self, lane: Lane, done: OpenRequest, frame: Frame, now_ns: int) -> None:
        """The lane's request has its answer."""
        self._unanswered -= 1
        message = frame.message
        if isinstance(message, Failure):
            if message.code is ErrorCode.REFUSED:
                self._fail(UsageError(f"the proxy refuses these requests: {message.message}", where=self.spec.address))
                return
            self._tally.end(LoadOutcome[message.code.name], done.intended_ns, now_ns)
            self._plan.free(lane.number, now_ns, _PAUSE_NS)
        else:
            self._tally.end(LoadOutcome.ANSWERED, done.intended_ns, now_ns)
            self._check(cast(Result, message), frame, lane.payload)
            self._plan.free(lane.number, now_ns)
        self._pump()

    def lost(self, lane: Lane, reason: str) -> None:
        """The lane's connection has ended; it is opened again in a while."""
        del self._lanes[lane.number]
        if self._finished.done():
            return
        if not self._started:
            self._fail(UsageError(f"the proxy ended a connection: {reason}", where=self.spec.address))
            return
        self._tally.lose(reason)
        if lane.open is None:
            self._plan.withdraw(lane.number)
        else:
            self._unanswered -= 1
            self._tally.end(LoadOutcome.LOST, lane.open.intended_ns, time.monotonic_ns())
        task = self._loop.create_task(self._reconnect(lane.number))
        self._reconnecting.add(task)
        task.add_done_callback(self._reconnecting.discard)
        self._pump()

    # sending

    async def _send_all(self) -> LoadResult:
        spec, begun_unix_s, cpu_s = self.spec, time.time(), time.process_time()
        begin_ns = time.monotonic_ns()
        self._end_ns = begin_ns + ns_from_s(spec.duration_s)
        self._tally = Tally((begin_ns + ns_from_s(spec.warmup_s), self._end_ns))
        self._plan = _plan(spec, begin_ns, self._end_ns)
        self._started = True
        gc.freeze()
        self._loop.add_reader(self._timer.fd, self._wake)
        self._say_progress(begin_ns, begin_ns, 0)
        self._pump()
        await asyncio.wait([self._finished], timeout=spec.duration_s + spec.patience_s)
        if self._finished.done():
            self._finished.result()
        now_ns = time.monotonic_ns()
        for lane in self._lanes.values():
            if lane.open is not None:
                self._tally.end(LoadOutcome.UNANSWERED, lane.open.intended_ns, now_ns)
        cpu_share = (time.process_time() - cpu_s) / s_from_ns(now_ns - begin_ns)
        return self._result(begun_unix_s, cpu_share)

    def _wake(self) -> None:
        self._timer.clear()
        self._pump()

    def _pump(self) -> None:
        """Send what is due, and see to it that this is called again in time."""
        if self._finished.done():
            return
        now_ns = time.monotonic_ns()
        for send in self._plan.due(now_ns):
            self._send(send)
        self._timer.set(self._plan.next_ns(now_ns))
        if not self._unanswered and self._plan.exhausted(now_ns):
            self._finished.set_result(None)

    def _send(self, send: Send) -> None:
        lane = self._lanes[send.lane]
        request = Request(self._next_id, self.spec.model, self._deadline_ns, self._inputs)
        self._next_id += 1
        frame: list[Buffer] = encode(request, lane.payload.parts)
        sent_ns = time.monotonic_ns()
        intended_ns = sent_ns if send.intended_ns is None else send.intended_ns
        lane.send(OpenRequest(request.request_id, intended_ns), frame)
        self._unanswered += 1
        self._tally.send(intended_ns, sent_ns, send.starved)

    def _check(self, result: Result, frame: Frame, payload: LoadPayload) -> None:
        self._tally.result_bytes += result.payload_bytes
        if payload.fingerprint is not None:
            if result.outputs and result.outputs[0].name == REAL_OUTPUT_NAME:
                self._fail(
                    UsageError(
                        "answers of a real model carry no fingerprint to compare",
                        observed=REAL_OUTPUT_NAME,
                        where="--verify",
                        hint="leave it out, or load a model whose compute is emulated",
                    )
                )
                return
            seen = b"" if frame.payload is None else frame.payload[:FINGERPRINT_BYTES]
            self._tally.wrong_answers += seen != payload.fingerprint

    def _fail(self, error: UsageError) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    # connections

    async def _connect_all(self) -> None:
        places = asyncio.Semaphore(_CONNECTING_AT_ONCE)

        async def connect(number: int) -> None:
            async with places:
                await self._connect(number)

        try:
            async with asyncio.timeout(CONNECT_S), asyncio.TaskGroup() as group:
                for number in range(self.spec.loop.connections):
                    group.create_task(connect(number))
        except (TimeoutError, ExceptionGroup) as error:
            reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else f"none within {CONNECT_S:g} s"
            if not isinstance(error, TimeoutError) and not isinstance(reason, OSError):
                raise
            raise UsageError(
                "no connection to the proxy",
                observed=str(reason),
                where=self.spec.address,
                hint="is `b2g serve` running there?",
            ) from error

    async def _connect(self, number: int) -> None:
        host, port = self.spec.host, self.spec.port
        payload = self.payloads[number % len(self.payloads)]
        await self._loop.create_connection(lambda: Lane(number, payload, self), host, port, ssl=self._context)

    async def _reconnect(self, number: int) -> None:
        while True:
            await asyncio.sleep(_RECONNECT_S)
            try:
                await self._connect(number)
            except OSError:
                continue
            return

    # the end

    def _result(self, begun_unix_s: float, cpu_share: float) -> LoadResult:
        spec, tally = self.spec, self._tally
        is_open = isinstance(spec.loop, OpenLoop)
        return LoadResult(
            spec=spec,
            begun_unix_s=begun_unix_s,
            sent=tally.sent,
            outcomes=tally.outcomes,
            unsent=self._plan.unsent(),
            late=tally.late if is_open else None,
            starved=tally.starved if is_open else None,
            window_s=spec.duration_s - spec.warmup_s,
            window_answers=tally.window_answers,
            latency=tally.latency.quantiles,
            lateness=tally.lateness.quantiles if is_open else None,
            latency_hdr=tally.latency.encoded(),
            wrong_answers=tally.wrong_answers if spec.verify else None,
            lost_reasons=tally.lost_reasons,
            reconnects=tally.reconnects,
            distinct_payloads=len(self.payloads),
            request_bytes=tally.sent * spec.payload_bytes,
            result_bytes=tally.result_bytes,
            cpu_share=cpu_share,
        )

    def _say_progress(self, begin_ns: int, before_ns: int, before: int) -> None:
        """Say how far the load is and how many answers have come since it was said ``before``, regularly."""
        now_ns, answered = time.monotonic_ns(), self._tally.outcomes[LoadOutcome.ANSWERED]
        share = (now_ns - begin_ns) / (self._end_ns - begin_ns)
        _say(
            event="progress",
            stage="load" if share < 1 else "waiting for the last answers",
            share=min(1.0, share),
            per_s=(answered - before) * 1e9 / (now_ns - before_ns) if before_ns > begin_ns else None,
        )
        self._loop.call_later(_PROGRESS_S, self._say_progress, begin_ns, now_ns, answered)


def _plan(spec: LoadSpec, begin_ns: int, end_ns: int) -> Plan:
    loop = spec.loop
    if isinstance(loop, ClosedLoop):
        return ClosedPlan(loop.clients, begin_ns, end_ns, ns_from_s(loop.think_s))
    offsets_ns = intended_offsets(loop.arrivals, loop.rate_per_s, spec.duration_s, spec.seed)
    return OpenPlan(loop.connections, begin_ns, offsets_ns)


def _make_payloads(spec: LoadSpec) -> list[LoadPayload]:
    """A payload for each connection, fewer where they would take more than ``_PAYLOADS_BYTES``."""
    fits = _PAYLOADS_BYTES // max(1, spec.payload_bytes)
    rng = np.random.default_rng(spec.seed)
    payloads = []
    for _ in range(max(1, min(spec.loop.connections, fits))):
        parts = tuple(fill_row(rng, tensor) for tensor in spec.inputs)
        payloads.append(LoadPayload(parts, fingerprint(parts[0]) if spec.verify else None))
    return payloads


def _say(**event: Any) -> None:
    sys.stdout.buffer.write(event_to_json(event) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
