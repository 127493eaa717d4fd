"""Both clients against a small proxy stand-in on a real socket, which answers by the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import numpy as np
import pytest
import uvloop

from b2gmodel.errors import UsageError
from b2gmodel.live.arrays import Array, Tensor
from b2gmodel.live.client import (
    AsyncClient,
    Busy,
    Cancelled,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    Draining,
    InternalFailure,
    Malformed,
    Refused,
    RequestError,
    UpstreamFailed,
)
from b2gmodel.live.wire import (
    FROM_CLIENT,
    Cancel,
    Datatype,
    ErrorCode,
    Failure,
    Frame,
    FrameReader,
    Limits,
    Message,
    Request,
    Result,
    TensorSpec,
    WireError,
    encode,
)

FAILURES: dict[str, tuple[ErrorCode, type[RequestError]]] = {
    "busy": (ErrorCode.BUSY, Busy),
    "deadline": (ErrorCode.DEADLINE, DeadlineExceeded),
    "malformed": (ErrorCode.MALFORMED, Malformed),
    "upstream": (ErrorCode.UPSTREAM, UpstreamFailed),
    "draining": (ErrorCode.DRAINING, Draining),
    "refused": (ErrorCode.REFUSED, Refused),
    "cancelled": (ErrorCode.CANCELLED, Cancelled),
    "internal": (ErrorCode.INTERNAL, InternalFailure),
}
X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Proxy(asyncio.BufferedProtocol):
    """``echo`` returns its inputs, ``pair`` answers two in reverse, ``hold`` answers when cancelled."""

    def __init__(self, seen: list[Message]) -> None:
        self.seen = seen
        self.held: list[Frame] = []
        self.reader = FrameReader(
            lambda head: memoryview(bytearray(head.payload_bytes)), accepts=FROM_CLIENT, limits=Limits()
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self.reader.received(nbytes):
            self.seen.append(frame.message)
            self.answer(frame)

    def answer(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Cancel):
            self.send(Failure(message.request_id, ErrorCode.CANCELLED, "withdrawn"))
            return
        assert isinstance(message, Request)
        if message.model in FAILURES:
            self.send(Failure(message.request_id, FAILURES[message.model][0], "so be it"))
        elif message.model == "echo":
            self.echo(frame)
        elif message.model == "pair":
            self.held.append(frame)
            if len(self.held) == 2:
                self.echo(self.held.pop())
                self.echo(self.held.pop())
        elif message.model == "goodbye":
            self.send(Failure(None, ErrorCode.DRAINING, "all of you"))
            self.transport.close()
        elif message.model == "drop":
            self.transport.close()
        elif message.model == "half":
            self.transport.write(encode(Failure(message.request_id, ErrorCode.BUSY, "x"))[0][:20])
            self.transport.close()
        elif message.model == "rubbish":
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        elif message.model == "stranger":
            self.send(Failure(message.request_id + 1, ErrorCode.BUSY, "x"))
        else:
            assert message.model == "hold"

    def echo(self, frame: Frame) -> None:
        assert isinstance(frame.message, Request)
        result = Result(frame.message.request_id, frame.message.inputs)
        self.send(result, [part for _, part in frame.tensors()])

    def send(self, message: Message, payloads: list[memoryview] | None = None) -> None:
        self.transport.writelines(encode(message, payloads or []))


class Running:
    def __init__(self, port: int, seen: list[Message]) -> None:
        self.port = port
        self.seen = seen


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The stand-in in a thread of its own; what it read is in ``seen``."""
    seen: list[Message] = []
    ready = threading.Event()
    state: dict[str, object] = {}

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Proxy(seen), "127.0.0.1", 0)
        stop = asyncio.Event()
        state.update(loop=loop, stop=stop, port=server.sockets[0].getsockname()[1])
        ready.set()
        async with server:
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield Running(cast(int, state["port"]), seen)
    cast(asyncio.AbstractEventLoop, state["loop"]).call_soon_threadsafe(cast(asyncio.Event, state["stop"]).set)
    thread.join(10)


Ask = Callable[..., dict[str, Array]]


@pytest.fixture(params=["sync", "asyncio", "uvloop"])
def ask(request: pytest.FixtureRequest, running: Running) -> Iterator[Ask]:
    """``infer`` of each client as a plain function."""
    if request.param == "sync":
        with Client("127.0.0.1", running.port, timeout_s=20) as client:
            yield client.infer
        return
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:

        async def make() -> AsyncClient:
            return AsyncClient("127.0.0.1", running.port, timeout_s=20)

        client_ = runner.run(make())
        yield lambda *args, **kwargs: runner.run(client_.infer(*args, **kwargs))
        runner.run(client_.aclose())


@pytest.mark.parametrize(
    "array",
    [
        X,
        X.astype(np.float16),
        X.astype(np.float64),
        X.astype(bool),
        X.T,
        X[:, ::2],
        X.astype(">f4"),
        np.array(3, np.float32),
        np.zeros((0, 7), np.int64),
        *(np.array([0, 1, 100], dtype) for dtype in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")),
        np.array([[b"one", b""], [b"\xff\x00", b"four"]], dtype=object),
    ],
    ids=lambda array: f"{array.dtype.str}-{array.shape}",
)
def test_values_come_back_as_they_were_sent(ask: Ask, array: Array) -> None:
    outputs = ask("echo", {"x": array, "other": X})
    assert list(outputs) == ["x", "other"]
    assert outputs["x"].shape == array.shape
    assert outputs["x"].dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(outputs["x"], array)
    np.testing.assert_array_equal(outputs["other"], X)


def test_text_becomes_bytes_and_bf16_is_widened(ask: Ask) -> None:
    halves = Tensor(Datatype.BF16, (2,), np.array([0x3FC0, 0xC000], "<u2").tobytes())
    outputs = ask("echo", {"text": np.array(["größe", "x"]), "halves": halves})
    assert outputs["text"].tolist() == ["größe".encode(), b"x"]
    assert outputs["halves"].dtype == np.float32
    assert outputs["halves"].tolist() == [1.5, -2.0]


def test_a_payload_larger_than_all_socket_buffers(ask: Ask) -> None:
    big = np.random.default_rng(1).integers(0, 255, (4, 5_000_000), np.uint8)
    np.testing.assert_array_equal(ask("echo", {"x": big})["x"], big)


@pytest.mark.parametrize("model", FAILURES)
def test_each_error_code_has_its_exception_and_the_connection_goes_on(ask: Ask, model: str) -> None:
    with pytest.raises(FAILURES[model][1], match=r"proxy 127\.0\.0\.1:\d+: so be it"):
        ask(model, {"x": X})
    np.testing.assert_array_equal(ask("echo", {"x": X})["x"], X)


@pytest.mark.parametrize(
    ("model", "expected", "said"),
    [
        ("goodbye", Draining, "all of you"),
        ("drop", ConnectionLost, "the proxy closed it"),
        ("half", ConnectionLost, "closed within a frame"),
        ("rubbish", ConnectionLost, "not this protocol"),
        ("stranger", ConnectionLost, "answer to"),
    ],
)
def test_a_lost_connection_is_reported_and_the_next_call_opens_a_new_one(
    ask: Ask, model: str, expected: type[RequestError], said: str
) -> None:
    with pytest.raises(expected, match=said):
        ask(model, {"x": X})
    np.testing.assert_array_equal(ask("echo", {"x": X})["x"], X)


def test_the_deadline_is_sent_in_nanoseconds(ask: Ask, running: Running) -> None:
    ask("echo", {"x": X}, deadline_s=0.025)
    last = running.seen[-1]
    assert isinstance(last, Request)
    assert last.deadline_ns == 25_000_000
    ask("echo", {"x": X})
    last = running.seen[-1]
    assert isinstance(last, Request)
    assert last.deadline_ns is None


def test_bad_arguments_are_refused_before_anything_is_sent(ask: Ask, running: Running) -> None:
    before = len(running.seen)
    for arguments, problem in (
        ({"inputs": {"x": X}, "deadline_s": 0.0}, "a deadline must be positive"),
        ({"inputs": {"x": X.astype(complex)}}, "no datatype for this array: saw 'complex128'"),
        ({"inputs": {"x": [1.0]}}, "not an input: saw 'list'"),
        ({"inputs": {"x": np.array([1, None], object)}}, "an object array holds something else: saw '1'"),
    ):
        with pytest.raises(UsageError, match=problem):
            ask("echo", **arguments)
    with pytest.raises(WireError, match="no tensors"):
        ask("echo", {})
    assert len(running.seen) == before


def test_nobody_listening() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with (
            Client("127.0.0.1", port) as client,
            pytest.raises(ConnectionLost, match=f"proxy 127.0.0.1:{port}: no connection.*b2g serve"),
        ):
            client.infer("echo", {"x": X})

        async def ask() -> None:
            async with AsyncClient("127.0.0.1", port) as client:
                await client.infer("echo", {"x": X})

        with pytest.raises(ConnectionLost, match="no connection"):
            asyncio.run(ask())


def test_a_call_without_an_answer_ends_by_its_timeout(running: Running) -> None:
    with Client("127.0.0.1", running.port, timeout_s=0.05) as client:
        with pytest.raises(DeadlineExceeded, match=r"no answer in time; allowed: 0\.05 s"):
            client.infer("hold", {"x": X})
        assert client._sock is None  # what may still come belongs to no call

    async def ask() -> None:
        async with AsyncClient("127.0.0.1", running.port, timeout_s=0.05) as client:
            await client.infer("hold", {"x": X})

    with pytest.raises(DeadlineExceeded, match=r"no answer in time; allowed: 0\.05 s"):
        asyncio.run(ask())
    with pytest.raises(UsageError, match="a timeout must be positive"):
        Client("127.0.0.1", running.port, timeout_s=0)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, running: Running) -> Callable[[Callable[[AsyncClient], Awaitable[None]]], None]:
    """Runs a coroutine function with a client of the stand-in."""

    def run_with_client(work: Callable[[AsyncClient], Awaitable[None]]) -> None:
        async def main() -> None:
            async with AsyncClient("127.0.0.1", running.port, timeout_s=20) as client:
                await work(client)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return run_with_client


Run = Callable[[Callable[[AsyncClient], Awaitable[None]]], None]


def test_many_calls_at_once_each_get_their_own_answer(run: Run) -> None:
    async def work(client: AsyncClient) -> None:
        inputs = [np.full(1 + 997 * i, i, np.int32) for i in range(60)]
        models = ["pair" if i % 3 else "echo" for i in range(60)]  # an even number of pairs, answered in reverse
        answers = await asyncio.gather(
            *(client.infer(model, {"x": x}) for model, x in zip(models, inputs, strict=True))
        )
        for x, answer in zip(inputs, answers, strict=True):
            np.testing.assert_array_equal(answer["x"], x)

    run(work)


def test_a_cancelled_call_is_withdrawn_and_the_others_go_on(run: Run, running: Running) -> None:
    async def work(client: AsyncClient) -> None:
        held = asyncio.create_task(client.infer("hold", {"x": X}))
        await client.infer("echo", {"x": X})  # sent after it, so it has been sent, too
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        np.testing.assert_array_equal((await client.infer("echo", {"x": X}))["x"], X)
        assert [type(message) for message in running.seen[-4:]] == [Request, Request, Cancel, Request]

    run(work)


def test_a_call_cancelled_before_it_was_sent_is_never_sent(run: Run, running: Running) -> None:
    async def work(client: AsyncClient) -> None:
        await client.infer("echo", {"x": X})
        before = len(running.seen)
        unsent = asyncio.create_task(client.infer("hold", {"x": X}))
        asyncio.get_running_loop().call_soon(unsent.cancel)
        with pytest.raises(asyncio.CancelledError):
            await unsent
        await client.infer("echo", {"x": X})
        assert [m.model for m in running.seen[before:] if isinstance(m, Request)][-1] == "echo"
        assert len(running.seen) - before in (1, 3)  # not sent at all, or sent and withdrawn

    run(work)


def test_a_call_cancelled_in_mid_frame_leaves_the_stream_whole(run: Run) -> None:
    async def work(client: AsyncClient) -> None:
        big = np.zeros(20_000_000, np.uint8)
        await client.infer("echo", {"x": X})
        sending = asyncio.create_task(client.infer("hold", {"x": big}))
        for _ in range(3):
            await asyncio.sleep(0)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        np.testing.assert_array_equal((await client.infer("echo", {"x": X}))["x"], X)

    run(work)


@pytest.mark.parametrize(("model", "expected"), [("drop", ConnectionLost), ("goodbye", Draining)])
def test_a_lost_connection_ends_every_open_call(run: Run, model: str, expected: type[RequestError]) -> None:
    async def work(client: AsyncClient) -> None:
        answers = await asyncio.gather(
            *(client.infer("hold", {"x": X}) for _ in range(5)),
            client.infer(model, {"x": X}),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [expected] * 6

    run(work)


def test_closing_ends_open_calls(run: Run) -> None:
    async def work(client: AsyncClient) -> None:
        held = asyncio.create_task(client.infer("hold", {"x": X}))
        await client.infer("echo", {"x": X})
        await client.aclose()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await held

    run(work)


def test_outputs_are_views_of_one_payload() -> None:
    from b2gmodel.live.arrays import unpack

    payload = np.zeros(24, np.uint8).data
    spec = TensorSpec("x", Datatype.FP32, (2, 3), 24)
    array = unpack(Frame(Result(1, (spec,)), payload))["x"]
    array[:] = 1
    assert bytes(payload) == np.ones(6, "<f4").tobytes()
