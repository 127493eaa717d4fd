"""One kept-alive HTTP/1.1 connection to an inference server, with gathered requests.

h11 frames the heads. A body with a length never passes through h11's buffer: request bodies are gathered from
the caller's own buffers, response bodies are received straight into the buffer that is handed to the caller.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import h11

from b2gmodel.errors import ServerError
from b2gmodel.flights import ExchangeTimes
from b2gmodel.live.gather import send_gathered

Buffer = bytes | bytearray | memoryview

_HEAD_LIMIT_BYTES: Final = 64 * 1024
_HEAD_END: Final = b"\r\n\r\n"
DEFAULT_BODY_LIMIT_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete response. Header names are lower case; ``body`` is the caller's own."""

    status: int
    headers: dict[str, str]
    body: memoryview
    times: ExchangeTimes

    def json(self) -> Any:
        """The body as JSON. Raises ``ServerError`` where it is none."""
        try:
            return json.loads(bytes(self.body))
        except ValueError as error:
            raise ServerError(
                "the server's answer is not JSON",
                observed=bytes(self.body[:80]).decode("latin-1"),
                hint="is this the address of a KServe v2 server's HTTP endpoint?",
            ) from error

    def error_text(self) -> str:
        """The server's own words about a failure, shortened."""
        text = bytes(self.body[:400]).decode("utf-8", "replace")
        try:
            parsed = json.loads(text)
        except ValueError:
            return text.strip()
        return str(parsed.get("error", text)) if isinstance(parsed, dict) else text


async def _connected(loop: asyncio.AbstractEventLoop, family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(slots=True)
class HttpConnection:
    """A connection that carries one exchange at a time.

    Args:
        host, port: the server's HTTP endpoint.
        body_limit_bytes: a longer response body is refused before memory is taken for it.
        spin_ns: how long to look for an answer without sleeping, before waiting for it as usual.
    """

    host: str
    port: int
    body_limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES
    spin_ns: int = 0
    _sock: socket.socket | None = None
    _head: bytearray = field(default_factory=lambda: bytearray(_HEAD_LIMIT_BYTES))

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    async def connect(self) -> None:
        """Connect, unless connected, to the first of the host's addresses that answers.

        Raises:
            ServerError: none does, or the host is unknown.
        """
        if self._sock is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise self._failed("cannot reach the server", error) from error
        last: OSError | None = None
        for family, _, _, _, address in infos:
            try:
                self._sock = await _connected(loop, family, address)
                return
            except OSError as error:
                last = error
        raise self._failed("cannot reach the server", last) from last

    def close(self) -> None:
        """Close at once; a later request connects again."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: Sequence[Buffer] = (),
    ) -> HttpResponse:
        """One exchange; the connection is closed if it does not complete.

        One that the server has closed meanwhile, or on which it said more than it had announced, is opened anew.

        Args:
            method, target: as in the request line.
            headers: beside Host and Content-Length, which are set here.
            body: buffers, sent one after the other without being joined.

        Raises:
            ServerError: the connection failed, or the answer is not HTTP.
        """
        if self._sock is not None and _is_stale(self._sock):
            self.close()
        await self.connect()
        complete = False
        try:
            response = await self._exchange(method, target, headers, body)
            complete = True
            return response
        except OSError as error:
            raise self._failed("the connection to the server broke", error) from error
        except h11.RemoteProtocolError as error:
            raise self._failed("the server's answer is not HTTP/1.1", error) from error
        finally:
            if not complete:
                self.close()

    async def _exchange(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: Sequence[Buffer]
    ) -> HttpResponse:
        loop, sock = asyncio.get_running_loop(), self._sock
        assert sock is not None
        framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_LIMIT_BYTES)
        length = sum(memoryview(piece).nbytes for piece in body)
        head = framing.send(
            h11.Request(
                method=method,
                target=target,
                headers=[("Host", self.address), ("Content-Length", str(length)), *headers],
            )
        )
        assert head is not None
        pieces: list[Buffer] = [head]
        for piece in body:
            # h11 keeps count of the announced length and hands our own buffer back.
            passed = framing.send_with_data_passthrough(h11.Data(data=memoryview(piece).cast("B")))  # type: ignore[arg-type]
            pieces.extend(passed or ())
        framing.send(h11.EndOfMessage())
        times = ExchangeTimes(send_begin_ns=time.monotonic_ns())
        await send_gathered(loop, sock, pieces)
        times.send_end_ns = time.monotonic_ns()
        return await self._receive(loop, sock, framing, times)

    async def _receive(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        framing: h11.Connection,
        times: ExchangeTimes,
    ) -> HttpResponse:
        head = memoryview(self._head)
        filled, end = 0, -1
        if self.spin_ns:
            _spin_until_readable(sock, self.spin_ns)
        while end < 0:
            if filled == len(head):
                raise ServerError(
                    "the answer's head is too long",
                    observed=filled,
                    allowed=f"< {filled} bytes",
                    where=self.address,
                )
            got = await loop.sock_recv_into(sock, head[filled:])
            if not got:
                raise self._failed("the server closed the connection before it answered", None)
            if times.first_byte_ns is None:
                times.first_byte_ns = time.monotonic_ns()
            search_from, filled = max(0, filled - len(_HEAD_END) + 1), filled + got
            end = self._head.find(_HEAD_END, search_from, filled)
        end += len(_HEAD_END)
        framing.receive_data(bytes(head[:end]))
        event = framing.next_event()
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError(f"expected a response, got {type(event).__name__}")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        rest = head[end:filled]
        if "transfer-encoding" in headers or "content-length" not in headers:
            body = await self._receive_unmeasured(loop, sock, framing, rest)
        else:
            body = await self._receive_measured(loop, sock, int(headers["content-length"]), rest)
        times.response_end_ns = time.monotonic_ns()
        if framing.our_state is h11.MUST_CLOSE:
            self.close()  # the server said so, or speaks a version that does
        return HttpResponse(event.status_code, headers, body, times)

    async def _receive_measured(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, length: int, rest: memoryview
    ) -> memoryview:
        if length > self.body_limit_bytes:
            raise ServerError(
                "the answer is too long",
                observed=f"{length} bytes",
                allowed=f"<= {self.body_limit_bytes} bytes",
                where=self.address,
            )
        if rest.nbytes > length:
            raise h11.RemoteProtocolError(f"{rest.nbytes - length} bytes after the announced end of the answer")
        body = memoryview(bytearray(length))
        body[: rest.nbytes] = rest
        filled = rest.nbytes
        while filled < length:
            got = await loop.sock_recv_into(sock, body[filled:])
            if not got:
                raise self._failed(f"the server closed after {filled} of {length} bytes of its answer", None)
            filled += got
        return body

    async def _receive_unmeasured(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, framing: h11.Connection, rest: memoryview
    ) -> memoryview:
        """A chunked body, or one that ends with the connection: small control answers only."""
        body = bytearray()
        framing.receive_data(bytes(rest)) if rest.nbytes else None
        while True:
            event = framing.next_event()
            if event is h11.NEED_DATA:
                data = await loop.sock_recv(sock, _HEAD_LIMIT_BYTES)
                framing.receive_data(data)
                if not data:
                    self.close()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self.body_limit_bytes:
                    raise ServerError(
                        "the answer is too long",
                        allowed=f"<= {self.body_limit_bytes} bytes",
                        where=self.address,
                    )
            else:
                return memoryview(bytes(body))

    def _failed(self, problem: str, error: BaseException | None) -> ServerError:
        return ServerError(
            problem,
            observed=None if error is None else str(error) or type(error).__name__,
            where=self.address,
            hint="check that the server is up and that this is its HTTP address",
        )


def _is_stale(sock: socket.socket) -> bool:
    """Whether there is something to read although nothing was asked: the connection's end, or stray bytes."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _spin_until_readable(sock: socket.socket, limit_ns: int) -> None:
    """Return when there is something to receive, or the limit has passed; the loop stands still meanwhile."""
    end_ns = time.monotonic_ns() + limit_ns
    while time.monotonic_ns() < end_ns:
        try:
            sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        return
