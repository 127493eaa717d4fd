"""The fake server's loop: connections, stages held for exact times, faults. It reads CLOCK_MONOTONIC itself.

Rules that hold here. Sockets are read and written directly, so that *when* a body is read is the script's
choice: h11 frames the heads, bodies go past it. Counters are booked with durations as performed, not as
asked. Counters are booked before the answer's first byte, so a client that has its answer finds them, unless
a fault says otherwise. The selector is ``select``: asyncio rounds an epoll timeout up to a whole millisecond,
and would be late by as much; hence the bound on connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import h11

from b2gmodel.errors import UsageError
from b2gmodel.live import fake_protocol as protocol
from b2gmodel.live.fake_script import Delays, FakeModel, FakeScript, Fault, FaultKind, LogEntry

MAX_CONNECTIONS: Final = 900
CONTROL_CONNECTIONS: Final = 16
LOG_ENTRIES: Final = 20_000
BODY_LIMIT_BYTES: Final = 1 << 30
MISFRAMED_BYTES: Final = 64
_SPIN_NS: Final = 300_000
_READ_BYTES: Final = 1 << 16


async def wait_until(deadline_ns: int) -> None:
    """Return at ``deadline_ns`` or some tens of µs later: sleep for most of it, then go round the loop."""
    while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(max(0, left_ns - _SPIN_NS) / 1e9)


class _PeerGoneError(Exception):
    """The client closed, or the script closes on it."""


@dataclass(slots=True)
class _Model:
    spec: FakeModel
    counters: protocol.Counters
    gate: asyncio.Semaphore


@dataclass(slots=True)
class _Connection:
    """One client: its socket, bytes read too far, a body buffer that is reused, the head's framing."""

    sock: socket.socket
    accept_ns: int
    surplus: bytes = b""
    buffer: bytearray = field(default_factory=bytearray)
    framing: h11.Connection = field(default_factory=lambda: h11.Connection(h11.SERVER))

    async def read_head(self) -> h11.Request | None:
        """The next request's head, or None where the client closed between requests."""
        self.framing = h11.Connection(h11.SERVER)
        data = self.surplus
        while True:
            if data:
                self.framing.receive_data(data)
            event = self.framing.next_event()
            if isinstance(event, h11.Request):
                self.surplus = self.framing.trailing_data[0]
                return event
            data = await asyncio.get_running_loop().sock_recv(self.sock, _READ_BYTES)
            if not data:
                return None

    async def read_body(self, size: int) -> memoryview:
        """The body's bytes, valid until the next request on this connection."""
        if len(self.buffer) < size:
            self.buffer = bytearray(size)
        body = memoryview(self.buffer)[:size]
        have = min(size, len(self.surplus))
        body[:have], self.surplus = self.surplus[:have], self.surplus[have:]
        while have < size:
            got = await asyncio.get_running_loop().sock_recv_into(self.sock, body[have:])
            if not got:
                raise _PeerGoneError
            have += got
        return body

    async def send(self, *parts: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(parts))

    async def wait_for_leaving(self) -> None:
        while await asyncio.get_running_loop().sock_recv(self.sock, _READ_BYTES):
            pass
        raise _PeerGoneError


def _header(request: h11.Request, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in request.headers if key == name), None)


def _head(framing: h11.Connection, status: int, headers: list[tuple[str, str]], length: int) -> bytes:
    response = h11.Response(status_code=status, headers=[*headers, ("Content-Length", str(length))])
    return framing.send(response) or b""


class FakeCore:
    """All state of a running fake: the script, the models with their counters, the log."""

    def __init__(self, script: FakeScript, port: int = 0) -> None:
        self.models: dict[str, _Model] = {}
        self.log: deque[LogEntry] = deque(maxlen=LOG_ENTRIES)
        self.count = 0
        self.listener = _listen(port)
        self.control = _listen(0)
        self._acceptor: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self.install(script)

    def install(self, script: FakeScript) -> None:
        """Follow ``script`` from the next request on. Models that stay keep counters; ordinals restart."""
        self.script = script
        self._base = self.count
        self.models = {
            spec.name: _Model(
                spec,
                self.models[spec.name].counters if spec.name in self.models else protocol.Counters(),
                asyncio.Semaphore(spec.instances),
            )
            for spec in script.models
        }
        if script.accept and self._acceptor is None:
            self._acceptor = asyncio.create_task(self._accept(self.listener, self._slots))
        elif not script.accept and self._acceptor is not None:
            self._acceptor.cancel()
            self._acceptor = None

    async def serve_control(self) -> None:
        """Accept on the control address, whatever the script says, until cancelled."""
        await self._accept(self.control, asyncio.Semaphore(CONTROL_CONNECTIONS))

    async def _accept(self, listener: socket.socket, slots: asyncio.Semaphore) -> None:
        """Serve each connection in a task of its own, which outlives this one, as many at a time as slots."""
        while True:
            await slots.acquire()
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except BaseException:
                slots.release()
                raise
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.script.receive_buffer_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.script.receive_buffer_bytes)
            task = self._spawn(self._serve(_Connection(sock, time.monotonic_ns())))
            task.add_done_callback(lambda _: slots.release())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, client: _Connection) -> None:
        with client.sock, contextlib.suppress(_PeerGoneError, OSError):
            while await self._exchange(client):
                pass

    async def _exchange(self, client: _Connection) -> bool:
        """Serve one request; True where the connection can carry another."""
        try:
            request = await client.read_head()
        except h11.RemoteProtocolError as error:
            await client.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            raise _PeerGoneError from error
        if request is None:
            return False
        header_ns = time.monotonic_ns()
        size = int(_header(request, b"content-length") or "0")
        if _header(request, b"transfer-encoding") or size > BODY_LIMIT_BYTES:
            await self._say(client, 400, {"error": "the fake reads bodies of a stated length up to 1 GiB"})
            return False
        if client.framing.they_are_waiting_for_100_continue:
            await client.send(client.framing.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        path = urlsplit(request.target.decode("latin-1"))
        parts = [unquote(part) for part in path.path.removesuffix("/").split("/")[1:]]
        if parts[3:5] == ["versions", "1"]:
            del parts[3:5]
        if request.method == b"POST" and parts[:2] == ["v2", "models"] and parts[3:] == ["infer"]:
            await self._infer(client, request, parts[2], size, header_ns)
        else:
            body = bytes(await client.read_body(size))
            status, document = self._resource(request.method.decode(), parts, parse_qs(path.query), body)
            await self._say(client, status, document)
        closing = "close" in (_header(request, b"connection") or "").lower() or request.http_version == b"1.0"
        return not closing

    async def _say(self, client: _Connection, status: int, document: Any) -> None:
        body = b"" if document is None else json.dumps(document, separators=(",", ":")).encode()
        kind = "text/plain" if document is None else "application/json"
        await client.send(_head(client.framing, status, [("Content-Type", kind)], len(body)), body)

    def _resource(self, method: str, parts: list[str], query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        """Status and JSON document (None: an empty body) of everything but inference."""
        match method, *parts:
            case "POST", "fake", "script":
                try:
                    self.install(FakeScript.from_json(body))
                except UsageError as error:
                    return 400, {"error": error.line()}
                return 200, {}
            case "GET", "fake", "log":
                text = query.get("since", ["0"])[0]
                since = int(text) if text.isdecimal() else 0
                return 200, {"entries": [entry.to_dict() for entry in list(self.log) if entry.number > since]}
            case "GET", "v2":
                return 200, protocol.SERVER_METADATA
            case "GET", "v2", "health", "live" | "ready":
                return 200, None
            case "POST", "v2", "repository", "index":
                return 200, [{"name": name, "version": "1", "state": "READY"} for name in self.models]
            case "GET", "v2", "models", "stats":
                return 200, {"model_stats": [m.counters.document(name) for name, m in self.models.items()]}
            case "GET", "v2", "models", name, *what if what in ([], ["ready"], ["config"], ["stats"]):
                return self._model_resource(name, what[0] if what else None)
            case _:
                return 404, {"error": "Not Found"}

    def _model_resource(self, name: str, what: str | None) -> tuple[int, Any]:
        model = self.models.get(name)
        unknown = {"error": protocol.unknown_model(name)}
        match what:
            case "ready":
                return (200, None) if model else (400, {"error": "Model version not ready"})
            case "stats":
                if model is None:
                    return 400, {"error": f"requested model '{name}' is not available"}
                return 200, {"model_stats": [model.counters.document(name)]}
            case "config":
                return (200, protocol.configuration(model.spec)) if model else (404, unknown)
            case _:
                return (200, protocol.metadata(model.spec)) if model else (404, unknown)

    async def _infer(self, client: _Connection, head: h11.Request, name: str, size: int, header_ns: int) -> None:
        """One inference request from its head to its last byte, as the script has it."""
        self.count += 1
        faults = self.script.faults_of(self.count - self._base)
        entry = LogEntry(self.count, name, tuple(faults), client.accept_ns, header_ns)
        self.log.append(entry)
        try:
            model, request = await self._receive(client, head, size, faults, entry)
        except protocol.RejectedError as rejected:
            entry.status, entry.first_byte_ns = rejected.status, time.monotonic_ns()
            await self._say(client, rejected.status, {"error": rejected.message})
            entry.last_byte_ns = time.monotonic_ns()
            return
        spent_ns = await self._execute(model, request.rows, entry)
        free_ns = time.monotonic_ns()
        book = partial(self._book, name, request.rows, spent_ns, faults)
        late = faults.get(FaultKind.COUNTERS_LATE)
        if late is None:
            book()
        try:
            await wait_until(free_ns + model.spec.delays.answer_delay_ns)
            await self._answer(client, model.spec, request, faults, entry)
        finally:
            if late is not None:
                self._spawn(_later(time.monotonic_ns() + late.lag_ns, book))

    async def _receive(
        self,
        client: _Connection,
        head: h11.Request,
        size: int,
        faults: Mapping[FaultKind, Fault],
        entry: LogEntry,
    ) -> tuple[_Model, protocol.InferRequest]:
        """Read the body when its time has come, and check it. ``RejectedError`` is the answer where bad."""
        model = self.models.get(entry.model)
        delays = model.spec.delays if model else Delays()
        await wait_until(entry.header_ns + delays.read_delay_ns)
        body = await client.read_body(size)
        entry.body_ns, entry.body_bytes = time.monotonic_ns(), size
        if model is None:
            raise protocol.RejectedError(404, protocol.unknown_model(entry.model))
        await wait_until(entry.body_ns + delays.receive_delay_ns)
        header_length = _header(head, b"inference-header-content-length")
        request = protocol.parse_infer(model.spec, header_length, body)
        entry.request_id, entry.rows = request.request_id, request.rows
        if FaultKind.NEVER_ANSWER in faults:
            await client.wait_for_leaving()
        if FaultKind.STATUS in faults:
            model.counters.fail.add(0, 1)
            status = faults[FaultKind.STATUS].status
            raise protocol.RejectedError(status, f"the script fails this request with status {status}")
        return model, request

    async def _execute(self, model: _Model, rows: int, entry: LogEntry) -> list[int]:
        """Queue, then hold an instance through three stages. The ns of each of the four, as performed."""
        delays = model.spec.delays
        stamps = [time.monotonic_ns()]
        entry.queue_start_ns = stamps[0]
        await wait_until(stamps[0] + delays.queue_delay_ns)
        async with model.gate:
            stamps.append(time.monotonic_ns())
            entry.compute_start_ns = stamps[-1]
            for stage_ns in (
                delays.compute_input_ns,
                delays.compute_infer_ns(rows),
                delays.compute_output_ns,
            ):
                await wait_until(stamps[-1] + stage_ns)
                stamps.append(time.monotonic_ns())
        entry.input_end_ns, entry.infer_end_ns, entry.compute_end_ns = stamps[2:]
        return [end - start for start, end in pairwise(stamps)]

    def _book(self, name: str, rows: int, spent_ns: list[int], faults: Container[FaultKind]) -> None:
        """Book ns in queue, input, infer and output into the counters of the model, if it is still there."""
        if name not in self.models:
            return
        if FaultKind.COUNTERS_RESET in faults:
            self.models[name].counters = protocol.Counters()
        self.models[name].counters.book(
            rows,
            spent_ns[0],
            spent_ns[1:],
            wall_ms=time.time_ns() // 1_000_000,
            sign=-1 if FaultKind.COUNTERS_BACKWARD in faults else 1,
        )

    async def _answer(
        self,
        client: _Connection,
        spec: FakeModel,
        request: protocol.InferRequest,
        faults: Mapping[FaultKind, Fault],
        entry: LogEntry,
    ) -> None:
        """Send head and body, misframed or cut as the faults say, the body after the return delay."""
        if FaultKind.CLOSE_BEFORE_ANSWER in faults:
            raise _PeerGoneError
        headers, body = protocol.answer(spec, request, faults)
        promised = len(body) + (MISFRAMED_BYTES if FaultKind.SHORT_BODY in faults else 0)
        head = _head(client.framing, 200, headers, promised)
        if FaultKind.LONG_BODY in faults:
            body += bytes(MISFRAMED_BYTES)
        if FaultKind.CLOSE_MID_BODY in faults:
            body = body[: len(body) // 2]
        entry.status, entry.first_byte_ns = 200, time.monotonic_ns()
        if spec.delays.return_delay_ns:
            await client.send(head)
            await wait_until(entry.first_byte_ns + spec.delays.return_delay_ns)
            await client.send(body)
        else:
            await client.send(head, body)
        entry.last_byte_ns = time.monotonic_ns()
        if FaultKind.CLOSE_MID_BODY in faults:
            raise _PeerGoneError
        if FaultKind.SHORT_BODY in faults:
            await client.wait_for_leaving()


async def _later(deadline_ns: int, act: Callable[[], None]) -> None:
    await wait_until(deadline_ns)
    act()


def _listen(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    listener.setblocking(False)
    return listener
