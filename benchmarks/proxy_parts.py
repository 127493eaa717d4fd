"""What the proxy's benchmarks share: a server that only swallows, loads in processes of their own, a bare forwarder.

Everything that runs beside the thing measured runs in its own process, so that no interpreter lock is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing as mp
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from b2gmodel.batcher import Policy
from b2gmodel.live.kserve import ModelSpec, TensorSpec
from b2gmodel.live.proxy import Proxy, ProxyLimits
from b2gmodel.live.transport import HttpTransport
from b2gmodel.live.wire import FROM_PROXY, Datatype, FrameReader, Request, Result, encode
from b2gmodel.live.wire import TensorSpec as WireSpec

KIB = 1024
REPLY = b"received"
_SPAWN = mp.get_context("spawn")


def null_model(payload_bytes: int, most: int = 64) -> ModelSpec:
    """A model that takes ``payload_bytes`` and answers eight."""
    return ModelSpec(
        name="sink",
        version="1",
        platform="none",
        max_batch_size=most,
        instances=1,
        dynamic_batching=False,
        inputs=(TensorSpec("x", "UINT8", (payload_bytes,)),),
        outputs=(TensorSpec("y", "UINT8", (8,)),),
        compute="null",
        parameters={},
    )


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process with a pipe to it, its first argument; ended with the block."""
    ours, theirs = _SPAWN.Pipe()
    child = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()
        ours.close()


# servers that swallow


def http_sink(pipe: Connection) -> None:
    """Takes inference requests, reads the body into memory of its own, answers eight bytes a row."""
    _accept(pipe, _swallow_http)


def raw_sink(pipe: Connection, message_bytes: int) -> None:
    """Takes messages of a fixed length, and answers each with ``REPLY``."""
    _accept(pipe, lambda sock: _swallow_raw(sock, message_bytes))


def _accept(pipe: Connection, serve: Callable[[socket.socket], None]) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    pipe.send(listener.getsockname())
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve_one, args=(serve, sock), daemon=True).start()


def _serve_one(serve: Callable[[socket.socket], None], sock: socket.socket) -> None:
    with sock, contextlib.suppress(ConnectionError):
        serve(sock)


def _swallow_raw(sock: socket.socket, message_bytes: int) -> None:
    room = memoryview(bytearray(message_bytes))
    while _fill(sock, room, 0):
        sock.sendall(REPLY)


def _swallow_http(sock: socket.socket) -> None:
    head, room = bytearray(64 * KIB), memoryview(bytearray(1))
    while True:
        filled = 0
        while (end := head.find(b"\r\n\r\n", 0, filled)) < 0:
            got = sock.recv_into(memoryview(head)[filled:])
            if not got:
                return
            filled += got
        fields = dict(line.lower().split(b": ", 1) for line in bytes(head[:end]).split(b"\r\n")[1:])
        length, json_bytes = int(fields[b"content-length"]), int(fields[b"inference-header-content-length"])
        if len(room) < length:
            room = memoryview(bytearray(length))
        early = filled - end - 4
        room[:early] = memoryview(head)[end + 4 : filled]
        if not _fill(sock, room[:length], early):
            return
        request = json.loads(bytes(room[:json_bytes]))
        rows = request["inputs"][0]["shape"][0]
        output = {"name": "y", "datatype": "UINT8", "shape": [rows, 8], "parameters": {"binary_data_size": 8 * rows}}
        answer = json.dumps({"id": request["id"], "model_name": "sink", "outputs": [output]}).encode()
        first = f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(answer)}\r\n"
        sock.sendall(f"{first}Content-Length: {len(answer) + 8 * rows}\r\n\r\n".encode() + answer + REPLY * rows)


def _fill(sock: socket.socket, room: memoryview, filled: int) -> bool:
    while filled < len(room):
        got = sock.recv_into(room[filled:])
        if not got:
            return False
        filled += got
    return True


# what is measured


def forwarder(pipe: Connection, upstream: tuple[str, int]) -> None:
    """Two sockets a client, bytes from one to the other through one reused buffer each way: nothing else."""
    import uvloop

    async def move(loop: asyncio.AbstractEventLoop, source: socket.socket, target: socket.socket) -> None:
        room = memoryview(bytearray(256 * KIB))
        while got := await loop.sock_recv_into(source, room):
            await loop.sock_sendall(target, room[:got])

    async def couple(loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
        server = socket.socket()
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(server, upstream)
            back = asyncio.ensure_future(move(loop, server, client))
            await move(loop, client, server)
            back.cancel()
        except OSError:
            pass
        finally:
            client.close()
            server.close()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        pipe.send(listener.getsockname())
        tasks = set()
        while True:
            client, _ = await loop.sock_accept(listener)
            task = asyncio.ensure_future(couple(loop, client))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def proxy(pipe: Connection, upstream: tuple[str, int], model: ModelSpec, policy: Policy) -> None:
    """The proxy. Any word over the pipe is answered with its CPU seconds and the flights since the last word."""
    from b2gmodel.live.run_loop import run_loop

    class Flights:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def request_done(self, outcome: object, bytes_in: int, bytes_out: int) -> None:
            pass

        def flight_done(self, flight: object) -> None:
            self.seen.append(flight)

    async def main() -> None:
        transport = HttpTransport(*upstream, model)
        serving = Proxy(model, policy, transport, run_id="bench", limits=ProxyLimits())
        flights = Flights()
        serving.add_observer(flights)
        pipe.send(await serving.start("127.0.0.1", 0))
        while True:
            # In a thread: a loop that watched the pipe would make it non-blocking, for what is sent, too.
            await asyncio.to_thread(pipe.recv)
            pipe.send((cpu_s(), flights.seen))
            flights.seen = []

    run_loop(main())


def cpu_s() -> tuple[float, float]:
    """User and system seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def resident_bytes(pid: int | str = "self", field: str = "VmRSS") -> int:
    """A process's memory from its status file: ``VmRSS`` now, ``VmHWM`` at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"no {field} for process {pid}")


# loads


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did: requests answered within the counted time, and each one's latency."""

    requests: int
    seconds: float
    latencies_s: list[float]


@dataclass(frozen=True, slots=True)
class Order:
    """What a load is to do: with ``count`` set, so many requests in all; else for ``seconds``, after ``warm_s``."""

    address: tuple[str, int]
    connections: int
    payload_bytes: int
    seconds: float = 0.0
    warm_s: float = 0.0
    count: int | None = None


def wire_load(pipe: Connection) -> None:
    """Closed loop of frames, one request at a time on each connection, for each order that comes."""
    while True:
        order = pipe.recv()
        spec = WireSpec("x", Datatype.UINT8, (order.payload_bytes,), order.payload_bytes)
        body = memoryview(bytearray(order.payload_bytes))

        def one(sock: socket.socket, number: int, spec: WireSpec = spec, body: memoryview = body) -> None:
            _send(sock, list(encode(Request(number, "sink", None, (spec,)), [body])))
            reader = FrameReader(lambda head: memoryview(bytearray(head.payload_bytes)), accepts=FROM_PROXY)
            while True:
                got = sock.recv_into(reader.get_buffer())
                for frame in reader.received(got):
                    if not isinstance(frame.message, Result) or frame.message.request_id != number:
                        raise RuntimeError(f"request {number} was answered {frame.message}")
                    return

        pipe.send(_closed_loop(order, one))


def raw_load(pipe: Connection) -> None:
    """Closed loop of bare messages, each waiting for its ``REPLY``."""
    while True:
        order = pipe.recv()
        body = memoryview(bytearray(order.payload_bytes))

        def one(sock: socket.socket, number: int, body: memoryview = body) -> None:
            sock.sendall(body)
            if not _fill(sock, memoryview(bytearray(len(REPLY))), 0):
                raise RuntimeError("the forwarder closed the connection")

        pipe.send(_closed_loop(order, one))


def _closed_loop(order: Order, one: Callable[[socket.socket, int], None]) -> Loaded:
    """Threads serve here: their system calls run side by side, and the payloads are never touched in Python."""
    begin_s = time.monotonic() + order.warm_s
    end_s = begin_s + order.seconds
    latencies_s: list[float] = []
    quotas = None if order.count is None else [order.count // order.connections] * order.connections

    failures: list[Exception] = []

    def client(index: int) -> None:
        try:
            ask(index)
        except Exception as failure:
            failures.append(failure)

    def ask(index: int) -> None:
        with socket.create_connection(order.address) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = 0
            while quotas is None or number < quotas[index]:
                number += 1
                sent_s = time.monotonic()
                one(sock, number)
                done_s = time.monotonic()
                if quotas is None and done_s >= end_s:
                    return
                if quotas is not None or done_s >= begin_s:
                    latencies_s.append(done_s - sent_s)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(order.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{len(failures)} of {order.connections} clients failed, one with: {failures[0]}")
    return Loaded(len(latencies_s), order.seconds or time.monotonic() - begin_s, latencies_s)


def _send(sock: socket.socket, pieces: list[Any]) -> None:
    while pieces:
        sent = sock.sendmsg(pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if pieces:
            pieces[0] = memoryview(pieces[0])[sent:]


MARK = struct.Struct("<Q")
