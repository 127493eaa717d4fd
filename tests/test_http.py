"""The HTTP connection against a peer that says exactly what the test has it say, byte by byte where it matters."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from b2gmodel.errors import ServerError
from b2gmodel.live import http
from b2gmodel.live.http import HttpConnection, HttpResponse
from b2gmodel.live.http_pool import HttpPool

T = TypeVar("T")
TIMEOUT_S = 30
GREETING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Name: A\r\n\r\nok"


class Peer:
    """Answers the n-th request with the n-th answer, over as many connections as it takes."""

    def __init__(self, answers: Sequence[Sequence[bytes]], family: socket.AddressFamily = socket.AF_INET) -> None:
        self._answers = iter(answers)
        self._listener = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
        self.host, self.port = self._listener.getsockname()[:2]
        self.requests: list[bytes] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Peer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes accept(); a peer that has nothing left to say leaves by itself.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with sock:
                sock.settimeout(TIMEOUT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (request := self._read(sock)) is not None:
                    self.requests.append(request)
                    pieces = next(self._answers)
                    for piece in pieces:
                        sock.sendall(piece)
                    if not pieces or pieces[-1] == b"":
                        break

    def _read(self, sock: socket.socket) -> bytes | None:
        data = b""
        while b"\r\n\r\n" not in data:
            try:
                piece = sock.recv(65536)
            except ConnectionResetError:
                return None
            if not piece:
                return None
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += sock.recv(65536)
        return head + b"\r\n\r\n" + body


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(limited())


@contextmanager
def connected(*answers: Sequence[bytes], **options: Any) -> Iterator[tuple[Peer, HttpConnection]]:
    with Peer(answers) as peer:
        connection = HttpConnection(peer.host, peer.port, **options)
        try:
            yield peer, connection
        finally:
            connection.close()


def one(*pieces: bytes, **options: Any) -> HttpResponse:
    """The response to one GET that is answered with ``pieces``."""
    with connected(pieces, **options) as (_, connection):
        return run(connection.request("GET", "/v2"))


def refused(*pieces: bytes, **options: Any) -> str:
    """The problem of the error that ``pieces`` lead to; the connection is closed after it."""
    with connected(pieces, **options) as (peer, connection):
        with pytest.raises(ServerError) as seen:
            run(connection.request("GET", "/v2"))
        assert connection._sock is None
        assert seen.value.where == f"127.0.0.1:{peer.port}"
        return seen.value.problem


class TestRequests:
    def test_whole(self) -> None:
        with connected([GREETING]) as (peer, connection):
            body = (b"ab", bytearray(b"cd"), memoryview(b"e"), b"")
            run(connection.request("POST", "/v2/models/m/infer", headers=[("X-Id", "7")], body=body))
        assert peer.requests == [
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 5\r\nX-Id: 7\r\n\r\nabcde"
            % peer.port
        ]

    def test_buffers_of_other_shapes_go_as_their_bytes(self) -> None:
        import numpy as np

        values = np.arange(6, dtype=np.float32).reshape(2, 3)
        with connected([GREETING]) as (peer, connection):
            run(connection.request("POST", "/", body=[values.data]))
        assert peer.requests[0].endswith(b"Content-Length: 24\r\n\r\n" + values.tobytes())

    def test_more_pieces_than_one_system_call_takes(self) -> None:
        pieces = [bytes([number % 256]) * 5000 for number in range(3000)]
        with connected([GREETING]) as (peer, connection):
            run(connection.request("POST", "/", body=pieces))
        assert peer.requests[0].partition(b"\r\n\r\n")[2] == b"".join(pieces)

    @pytest.mark.parametrize("name", ["a\r\nb", "a b"])
    def test_a_header_cannot_be_smuggled_in(self, name: str) -> None:
        with connected([GREETING]) as (peer, connection), pytest.raises(Exception, match="(?i)illegal"):
            run(connection.request("GET", "/", headers=[(name, "x")]))
        assert peer.requests == []


class TestResponses:
    def test_whole(self) -> None:
        response = one(GREETING)
        assert (response.status, bytes(response.body)) == (200, b"ok")
        assert response.headers == {"content-length": "2", "x-name": "A"}

    def test_byte_by_byte(self) -> None:
        response = one(*(bytes([byte]) for byte in GREETING))
        assert (response.status, bytes(response.body)) == (200, b"ok")

    def test_a_long_body_in_pieces(self) -> None:
        body = bytes(range(256)) * 20_000
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert bytes(one(head + body[:70_000], body[70_000:]).body) == body

    def test_chunked(self) -> None:
        response = one(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", b"3;x=y\r\nabc\r\n0\r\n\r\n"
        )
        assert bytes(response.body) == b"okabc"

    def test_until_the_end_of_the_connection(self) -> None:
        with connected([b"HTTP/1.1 200 OK\r\n\r\nok", b"!", b""]) as (_, connection):
            assert bytes(run(connection.request("GET", "/")).body) == b"ok!"
            assert connection._sock is None

    def test_without_a_body(self) -> None:
        assert bytes(one(b"HTTP/1.1 204 No Content\r\n\r\n").body) == b""

    def test_the_stages_follow_one_another(self) -> None:
        times = one(GREETING[:10], GREETING[10:]).times
        stamps = [times.send_begin_ns, times.send_end_ns, times.first_byte_ns, times.response_end_ns]
        assert None not in stamps
        assert stamps == sorted(stamp for stamp in stamps if stamp is not None)

    def test_each_body_is_memory_of_its_own(self) -> None:
        second = GREETING.replace(b"ok", b"no")
        with connected([GREETING], [second]) as (_, connection):

            async def both() -> tuple[bytes, bytes]:
                first = await connection.request("GET", "/")
                other = await connection.request("GET", "/")
                return bytes(first.body), bytes(other.body)

            assert run(both()) == (b"ok", b"no")

    def test_json(self) -> None:
        body = json.dumps({"a": [1]}).encode()
        assert one(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body).json() == {"a": [1]}
        with pytest.raises(ServerError, match="not JSON: saw 'ok'"):
            one(GREETING).json()

    @pytest.mark.parametrize(
        ("body", "text"),
        [(b'{"error":"no such model"}', "no such model"), (b" plain ", "plain"), (b"[1]", "[1]"), (b"\xff", "\ufffd")],
    )
    def test_the_servers_own_words(self, body: bytes, text: str) -> None:
        assert one(b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body).error_text() == text


NOT_HTTP = "the server's answer is not HTTP/1.1"
CLOSED = "the server closed the connection before it answered"


class TestBrokenAnswers:
    """One planted defect each; no answer is ever taken for whole when it is not."""

    @pytest.mark.parametrize(
        ("pieces", "problem"),
        [
            ([b""], CLOSED),
            ([b"HTTP/1.1 200", b""], CLOSED),
            ([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok"], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"], NOT_HTTP),
            ([b"HTTP/1.1 100 Continue\r\n\r\n"], NOT_HTTP),
            ([GREETING[:-1], b""], "the server closed after 1 of 2 bytes of its answer"),
            ([GREETING + b"tail"], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", b""], NOT_HTTP),
            ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000], "the answer's head is too long"),
        ],
    )
    def test_is_an_error(self, pieces: Sequence[bytes], problem: str) -> None:
        assert refused(*pieces) == problem

    @pytest.mark.parametrize(
        "head",
        [b"Content-Length: 11\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nb\r\n01234567890\r\n0\r\n\r\n", b"\r\n"],
    )
    def test_longer_than_the_limit(self, head: bytes) -> None:
        assert (
            refused(b"HTTP/1.1 200 OK\r\n" + head + b"01234567890", b"", body_limit_bytes=10)
            == "the answer is too long"
        )

    def test_an_absurd_length_takes_no_memory(self) -> None:
        assert refused(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n") == "the answer is too long"

    def test_after_an_error_the_next_exchange_connects_anew(self) -> None:
        with connected([GREETING + b"tail"], [GREETING]) as (peer, connection):
            with pytest.raises(ServerError):
                run(connection.request("GET", "/"))
            assert bytes(run(connection.request("GET", "/")).body) == b"ok"
        assert peer.connections == 2


class TestConnections:
    def test_one_is_kept_for_all_exchanges(self) -> None:
        with connected([GREETING], [GREETING]) as (peer, connection):

            async def twice() -> None:
                await connection.request("GET", "/1")
                await connection.request("GET", "/2")

            run(twice())
        assert (peer.connections, len(peer.requests)) == (1, 2)

    @pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: Close", b"HTTP/1.0 200 OK"])
    def test_one_that_the_server_will_close_is_not(self, head: bytes) -> None:
        closing = head + b"\r\nContent-Length: 2\r\n\r\nok"
        with connected([closing, b""], [GREETING]) as (peer, connection):
            run(connection.request("GET", "/1"))
            assert connection._sock is None
            run(connection.request("GET", "/2"))
        assert peer.connections == 2

    def test_cancelled_in_the_middle_it_is_closed(self) -> None:
        with connected([GREETING[:10]]) as (peer, connection):

            async def cancelled() -> None:
                task = asyncio.create_task(connection.request("GET", "/"))
                while not peer.requests:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            run(cancelled())
            assert connection._sock is None

    def test_a_dead_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}: cannot reach the server: saw"):
            run(HttpConnection("127.0.0.1", port).connect())

    @pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70 + ".example"])
    def test_an_unknown_host(self, host: str) -> None:
        with pytest.raises(ServerError, match="cannot reach the server"):
            run(HttpConnection(host, 80).connect())

    def test_all_addresses_of_a_host_are_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where ``localhost`` means ::1 first and the server listens on 127.0.0.1 alone."""
        with Peer([[GREETING]]) as peer, socket.create_server(("127.0.0.1", 0)) as reserved:
            dead = reserved.getsockname()
            reserved.close()

            async def main() -> bytes:
                async def found(*_: object, **__: object) -> list[Any]:
                    kinds = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
                    return [(*kinds, dead), (*kinds, (peer.host, peer.port))]

                monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
                connection = HttpConnection("localhost", peer.port)
                try:
                    return bytes((await connection.request("GET", "/")).body)
                finally:
                    connection.close()

            assert run(main()) == b"ok"

    def test_ipv6(self) -> None:
        try:
            peer = Peer([[GREETING]], socket.AF_INET6)
        except OSError:
            pytest.skip("this machine has no IPv6")
        with peer:
            connection = HttpConnection("::1", peer.port)
            run(connection.request("GET", "/"))
            connection.close()
        assert b"Host: [::1]:%d\r\n" % peer.port in peer.requests[0]


class TestPool:
    def test_the_last_used_is_the_first_used(self) -> None:
        with Peer([[GREETING]] * 3) as peer:
            pool = HttpPool(peer.host, peer.port)

            async def thrice() -> None:
                for _ in range(3):
                    await pool.request("GET", "/")

            run(thrice())
            pool.close()
        assert peer.connections == 1

    def test_what_is_in_use_at_the_close_is_closed_after_it(self) -> None:
        opened: list[HttpConnection] = []
        original: Callable[..., Any] = HttpConnection.request

        async def noted(connection: HttpConnection, *args: Any, **options: Any) -> HttpResponse:
            opened.append(connection)
            pool.close()
            return await original(connection, *args, **options)  # type: ignore[no-any-return]

        with Peer([[GREETING]]) as peer, pytest.MonkeyPatch.context() as patch:
            patch.setattr(http.HttpConnection, "request", noted)
            pool = HttpPool(peer.host, peer.port)
            run(pool.request("GET", "/"))
        assert [connection._sock for connection in opened] == [None]
