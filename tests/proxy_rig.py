"""A proxy in the test's own loop before a transport that the test holds in its hand, and a raw client."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import uvloop

from b2gmodel.batcher import Policy
from b2gmodel.errors import ServerError
from b2gmodel.flights import ExchangeTimes, Flight
from b2gmodel.live.kserve import ModelSpec, Tensor, TensorSpec
from b2gmodel.live.observer import Outcome
from b2gmodel.live.proxy import Proxy, ProxyLimits
from b2gmodel.live.transport import Delivery, Payload
from b2gmodel.live.wire import (
    FROM_PROXY,
    Buffer,
    Cancel,
    Datatype,
    ErrorCode,
    Failure,
    Frame,
    FrameReader,
    Message,
    Request,
    Result,
    encode,
)
from b2gmodel.live.wire import TensorSpec as WireSpec

TIMEOUT_S = 30
MODEL = ModelSpec(
    name="m",
    version="1",
    platform="test",
    max_batch_size=8,
    instances=1,
    dynamic_batching=False,
    inputs=(TensorSpec("x", "INT32", (2,)),),
    outputs=(TensorSpec("y", "INT32", (2,)),),
    compute="fake",
    parameters={},
)


def run(test: Coroutine[Any, Any, None]) -> None:
    """The test on uvloop, with a bound on its time."""

    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await test

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


class Held:
    """A batch that the test answers."""

    def __init__(self, payloads: Sequence[Payload]) -> None:
        self.payloads = payloads
        self.rows = [b"".join(bytes(part) for part in payload) for payload in payloads]
        self.answer: asyncio.Future[tuple[tuple[Tensor, ...], ...]] = asyncio.get_running_loop().create_future()

    def succeed(self, pad_bytes: int = 0) -> None:
        """Each request gets its own bytes back, and ``pad_bytes`` more."""
        bodies = [memoryview(bytes(row) + bytes(pad_bytes)) for row in self.rows]
        self.answer.set_result(tuple((Tensor("y", "INT32", (body.nbytes // 4,), body),) for body in bodies))

    def fail(self) -> None:
        self.answer.set_exception(ServerError("the server fell over"))


class HeldTransport:
    """Keeps each batch until the test answers it."""

    name = "held"

    def __init__(self) -> None:
        self.batches: asyncio.Queue[Held] = asyncio.Queue()

    def payload_memory(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        held = Held(payloads)
        self.batches.put_nowait(held)
        return Delivery(await held.answer, ExchangeTimes())

    async def warm(self, channels: int) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Seen:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.requests: list[tuple[Outcome, int, int]] = []
        self.flights: list[Flight] = []

    def request_done(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        self.requests.append((outcome, bytes_in, bytes_out))

    def flight_done(self, flight: Flight) -> None:
        self.flights.append(flight)


class Raw:
    """A client that sends what it is told to, and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stream, self.writer = reader, writer
        self._frames: list[Frame] = []
        self._reader = FrameReader(lambda head: memoryview(bytearray(head.payload_bytes)), accepts=FROM_PROXY)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def send(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        self.writer.writelines(encode(message, payloads))

    def ask(self, request_id: int, *values: int, deadline_ns: int | None = None, model: str = "m") -> None:
        """A request for ``MODEL`` (its first value is by default its id)."""
        values = values or (request_id, 0)
        spec = WireSpec("x", Datatype.INT32, (len(values),), 4 * len(values))
        self.send(Request(request_id, model, deadline_ns, (spec,)), [struct.pack(f"<{len(values)}i", *values)])

    def withdraw(self, request_id: int) -> None:
        self.send(Cancel(request_id))

    async def frame(self) -> Frame:
        """The next frame. Raises ``EOFError`` where the proxy has ended the connection."""
        while not self._frames:
            data = await self.stream.read(65536)
            if not data:
                raise EOFError
            self._frames.extend(self._reader.feed(data))
        return self._frames.pop(0)

    async def answer(self) -> tuple[int | None, ErrorCode | tuple[int, ...]]:
        """The next answer: its id, and the error's code or the result's values."""
        frame = await self.frame()
        if isinstance(frame.message, Failure):
            return frame.message.request_id, frame.message.code
        assert isinstance(frame.message, Result)
        assert frame.payload is not None
        return frame.message.request_id, struct.unpack(f"<{len(frame.payload) // 4}i", frame.payload)

    async def ended(self) -> bool:
        """Whether the proxy has ended the connection, and nothing came before that."""
        try:
            await self.frame()
        except (EOFError, ConnectionResetError):
            return True
        return False


class Rig:
    """A running proxy with its held transport."""

    def __init__(self, proxy: Proxy, transport: HeldTransport, address: tuple[str, int]) -> None:
        self.proxy, self.transport, self.address = proxy, transport, address
        self.seen = Seen()
        proxy.add_observer(self.seen)

    async def client(self) -> Raw:
        return Raw(*await asyncio.open_connection(*self.address))

    async def batch(self) -> Held:
        """The next batch that the proxy sends."""
        return await self.transport.batches.get()

    async def until(self, what: str, value: int) -> None:
        """Let the loop run until a number of the snapshot has this value."""
        while getattr(self.proxy.snapshot(), what) != value:
            await asyncio.sleep(0)

    def count(self, outcome: Outcome) -> int:
        return self.proxy.snapshot().outcomes[outcome]


@asynccontextmanager
async def rig(
    k: int = 1,
    flights: int = 1,
    queue: int = 8,
    formation_deadline_ns: int | None = None,
    model: ModelSpec = MODEL,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    **limits: Any,
) -> AsyncIterator[Rig]:
    """A rig; at its end no request may be unaccounted for, and no slot taken."""
    transport = HeldTransport()
    policy = Policy(k, flights, queue, formation_deadline_ns)
    limits.setdefault("linger_s", 0.05)
    proxy = Proxy(model, policy, transport, run_id="t", limits=ProxyLimits(**limits))
    it = Rig(proxy, transport, await proxy.start(host, 0, tls=tls))
    try:
        yield it
    finally:
        await proxy.aclose()
    end = proxy.snapshot()
    assert end.balances
    assert (end.open, end.slots_in_use, end.connections, end.queue_depth, end.in_flight) == (0, 0, 0, 0, 0)
    assert len(it.seen.requests) == end.received
