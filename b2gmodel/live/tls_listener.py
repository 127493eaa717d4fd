"""A listener whose clients speak TLS.

Rule of this module: nothing of a connection reaches the proxy before its handshake is done, and handshakes that are
not done are bounded in number and time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

_ACCEPT_PAUSE_S: Final = 0.1


class TlsListener:
    """Listening sockets whose clients become protocols once their handshake is done.

    Args:
        context: the server's.
        protocol: makes a client's protocol.
        handshakes: unfinished ones at a time; one more is closed at once.
        handshake_s: longest time for one.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        handshakes: int,
        handshake_s: float,
    ) -> None:
        self._context, self._protocol = context, protocol
        self._most, self._limit_s = handshakes, handshake_s
        self._unfinished: set[asyncio.Task[None]] = set()
        self.sockets: tuple[socket.socket, ...] = ()
        self.failed = 0
        """Handshakes that came to nothing, those that were one too many included."""

    @property
    def unfinished(self) -> int:
        """Handshakes under way."""
        return len(self._unfinished)

    def start(self, host: str, port: int, backlog: int) -> None:
        """Listen on all addresses of ``host``. Raises ``OSError`` or ``OverflowError``."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.sockets = tuple(_listen(address[0], address[4], backlog) for address in dict.fromkeys(found))
        for listening in self.sockets:
            self._take_from(listening)

    def close(self) -> None:
        """Take no more clients, and break off handshakes. Closing twice is harmless."""
        for listening in self.sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self.sockets = ()
        for task in self._unfinished:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until no handshake is under way any more."""
        if self._unfinished:
            await asyncio.wait(self._unfinished)

    def _take_from(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            client, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors, most likely: clients wait in the backlog until there are some
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._take_from, listening)
            return
        if len(self._unfinished) >= self._most:
            self.failed += 1
            client.close()
            return
        client.setblocking(False)
        task = loop.create_task(self._shake_hands(client))
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)

    async def _shake_hands(self, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, client, ssl=self._context, ssl_handshake_timeout=self._limit_s
            )
        except BaseException as error:
            client.close()
            if not isinstance(error, OSError):  # ssl's errors and a handshake's timeout are OSErrors
                raise
            self.failed += 1


def _listen(family: int, address: Any, backlog: int) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(backlog)
    except BaseException:
        listening.close()
        raise
    return listening
