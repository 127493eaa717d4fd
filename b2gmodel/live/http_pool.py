"""Kept-alive connections to one server, as many as exchanges run at once; an idle one is used again."""

from __future__ import annotations

from collections.abc import Sequence

from b2gmodel.live.http import Buffer, HttpConnection, HttpResponse


class HttpPool:
    """Exchanges with one server. The connection used last is used first: its buffers are the warmest."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[HttpConnection] = []
        self._closed = False

    async def request(
        self, method: str, target: str, *, headers: Sequence[tuple[str, str]] = (), body: Sequence[Buffer] = ()
    ) -> HttpResponse:
        """One exchange, as ``HttpConnection.request``."""
        connection = self._idle.pop() if self._idle else HttpConnection(self._host, self._port)
        try:
            return await connection.request(method, target, headers=headers, body=body)
        finally:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    async def warm(self, connections: int) -> None:
        """Open idle connections until there are that many. Raises ``ServerError`` where nothing answers."""
        self._idle.extend(HttpConnection(self._host, self._port) for _ in range(connections - len(self._idle)))
        for connection in self._idle:
            await connection.connect()

    def close(self) -> None:
        """Close what is idle now, and what is in use as soon as its exchange has ended."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()
