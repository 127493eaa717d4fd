"""Clients of the proxy: ``Client`` for plain code, ``AsyncClient`` for many requests at once.

Rules of this module:

* An input's bytes go from its array to the socket without a copy in user space (but for TLS, which copies to
  encrypt), and an output is a view of the memory that it was received into. Inputs must not change until their
  call has returned.
* Nothing is retried: whether a request may be sent twice is the caller's to know. After a loss the next call
  opens a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import time
from collections import deque
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.live.arrays import Array, Inputs, pack_inputs, unpack
from b2gmodel.live.link import Link, fresh, id_of
from b2gmodel.live.outcomes import (
    Busy,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    Draining,
    InternalFailure,
    Malformed,
    Peer,
    Refused,
    RequestError,
    UpstreamFailed,
)
from b2gmodel.live.stream import PlainStream, Stream, TlsStream
from b2gmodel.live.tls import ClientTls
from b2gmodel.live.wire import (
    DEFAULT_LIMITS,
    FROM_PROXY,
    Buffer,
    Failure,
    Frame,
    FrameReader,
    Limits,
    Request,
    WireError,
    encode,
)
from b2gmodel.units import ns_from_s

__all__ = [
    "AsyncClient",
    "Busy",
    "Cancelled",
    "Client",
    "ConnectionLost",
    "DeadlineExceeded",
    "Draining",
    "InternalFailure",
    "Malformed",
    "Refused",
    "RequestError",
    "UpstreamFailed",
]

_PIECES_PER_CALL: Final = 1024


class Client:
    """A client for plain code: one call at a time, from one thread. Use as a context manager, or close it.

    Args:
        host, port: the proxy's.
        timeout_s: how long one call may take altogether, connecting included.
        limits: bounds on a frame; the proxy's must be at least these.
        tls: whom to trust, and who to be; None for a proxy without TLS.

    Raises:
        UsageError: a file of ``tls`` that cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 60.0,
        limits: Limits = DEFAULT_LIMITS,
        tls: ClientTls | None = None,
    ) -> None:
        self._peer = Peer(host, port, timeout_s, limits)
        self._context = None if tls is None else tls.context()
        self._ids = itertools.count(1)
        self._sock: socket.socket | None = None
        self._reader = self._new_reader()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, model: str, inputs: Inputs, deadline_s: float | None = None) -> dict[str, Array]:
        """The model's outputs by name.

        Args:
            model: its name.
            inputs: arrays by name, shaped as the model takes one request.
            deadline_s: time that the proxy has from the request's arrival; None for no limit.

        Raises:
            RequestError: a subclass says why.
            UsageError, WireError: the request cannot be put on the wire; nothing was sent.
        """
        request_id = next(self._ids)
        buffers = _frame(self._peer, request_id, model, inputs, deadline_s)
        ends_s = time.monotonic() + self._peer.timeout_s
        try:
            frame = self._exchange(request_id, buffers, ends_s)
        except BaseException as error:
            # Whatever is still under way on this connection belongs to no call any more.
            self.close()
            if isinstance(error, TimeoutError):
                raise self._peer.too_late() from None
            if isinstance(error, OSError | WireError):
                raise self._peer.lost(error) from error
            raise
        if isinstance(frame.message, Failure):
            if frame.message.request_id is None:
                self.close()
            raise self._peer.failed(frame.message)
        return unpack(frame)

    def close(self) -> None:
        """Close the connection, if there is one. A later call opens a new one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _exchange(self, request_id: int, buffers: list[Buffer], ends_s: float) -> Frame:
        sock = self._connection(ends_s)
        # A proxy that refuses in mid-frame may close: its reason can still be read, so reading goes on.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _send(sock, buffers, ends_s)
        while True:
            _limit(sock, ends_s)
            count = sock.recv_into(self._reader.get_buffer())
            if count == 0:
                self._reader.finish()
                raise self._peer.lost("the proxy closed it before it answered")
            frames = list(self._reader.received(count))
            if frames:
                if id_of(frames[0]) not in (request_id, None):
                    allowed = str(request_id)
                    raise WireError("answer to another request", observed=id_of(frames[0]), allowed=allowed)
                if len(frames) > 1:  # the proxy has said more than was asked: it is ending the connection
                    self.close()
                return frames[0]

    def _connection(self, ends_s: float) -> socket.socket:
        if self._sock is None:
            address = (self._peer.host, self._peer.port)
            try:
                sock = socket.create_connection(address, timeout=max(1e-3, ends_s - time.monotonic()))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sock = sock if self._context is None else self._shake_hands(sock, self._context)
            except TimeoutError:
                raise
            except OSError as error:
                raise self._peer.unreachable(error) from error
            self._reader = self._new_reader()
        return self._sock

    def _shake_hands(self, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            return context.wrap_socket(sock, server_hostname=self._peer.host)
        except BaseException:
            sock.close()
            raise

    def _new_reader(self) -> FrameReader:
        return FrameReader(fresh, accepts=FROM_PROXY, limits=self._peer.limits)


class AsyncClient:
    """A client for asyncio (and uvloop): any number of calls at once on one connection.

    A call that is cancelled, or that runs into ``timeout_s``, withdraws its request; the others go on.
    Use as an asynchronous context manager, or ``aclose`` it. Arguments as for ``Client``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 60.0,
        limits: Limits = DEFAULT_LIMITS,
        tls: ClientTls | None = None,
    ) -> None:
        self._peer = Peer(host, port, timeout_s, limits)
        self._context = None if tls is None else tls.context()
        self._ids = itertools.count(1)
        self._connecting = asyncio.Lock()
        self._link: Link | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def infer(self, model: str, inputs: Inputs, deadline_s: float | None = None) -> dict[str, Array]:
        """The model's outputs by name. Arguments and errors as for ``Client.infer``."""
        request_id = next(self._ids)
        buffers = _frame(self._peer, request_id, model, inputs, deadline_s)
        try:
            async with asyncio.timeout(self._peer.timeout_s):
                link = await self._connection()
                frame = await link.call(request_id, buffers)
        except TimeoutError:
            raise self._peer.too_late() from None
        if isinstance(frame.message, Failure):
            raise self._peer.failed(frame.message)
        return unpack(frame)

    async def aclose(self) -> None:
        """Close the connection; open calls end as ``ConnectionLost``."""
        if self._link is not None:
            await self._link.aclose()
            self._link = None

    async def _connection(self) -> Link:
        async with self._connecting:
            if self._link is None or self._link.ended:
                self._link = Link(await self._connect(), self._peer)
            return self._link

    async def _connect(self) -> Stream:
        if self._context is None:
            return PlainStream(await self._connect_socket())
        try:
            streams = await asyncio.open_connection(self._peer.host, self._peer.port, ssl=self._context)
        except OSError as error:
            raise self._peer.unreachable(error) from error
        return TlsStream(*streams)

    async def _connect_socket(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        reason: OSError = OSError("the name has no address")
        try:
            found = await loop.getaddrinfo(self._peer.host, self._peer.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise self._peer.unreachable(error) from error
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                reason = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise self._peer.unreachable(reason) from reason


def _frame(peer: Peer, request_id: int, model: str, inputs: Inputs, deadline_s: float | None) -> list[Buffer]:
    """The request as buffers to send."""
    if deadline_s is not None and not deadline_s > 0:
        raise UsageError(
            "a deadline must be positive",
            observed=deadline_s,
            allowed="> 0 s or None",
            where="deadline_s",
        )
    deadline_ns = None if deadline_s is None else max(1, ns_from_s(deadline_s))
    specs, payloads = pack_inputs(inputs)
    return encode(Request(request_id, model, deadline_ns, specs), payloads, limits=peer.limits)


def _limit(sock: socket.socket, ends_s: float) -> None:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)


def _send(sock: socket.socket, buffers: list[Buffer], ends_s: float) -> None:
    """All of ``buffers``, gathered by the kernel where nothing has to be encrypted."""
    if isinstance(sock, ssl.SSLSocket):  # which cannot gather
        for buffer in buffers:
            _limit(sock, ends_s)
            sock.sendall(buffer)
        return
    pending = deque(memoryview(buffer) for buffer in buffers)
    while pending:
        _limit(sock, ends_s)
        sent = sock.sendmsg(list(itertools.islice(pending, _PIECES_PER_CALL)))
        while pending and sent >= len(pending[0]):
            sent -= len(pending.popleft())
        if sent:
            pending[0] = pending[0][sent:]
