"""How a client's link moves bytes: a plain socket, gathered by the kernel, or TLS, which copies to encrypt."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from b2gmodel.live.gather import send_gathered
from b2gmodel.live.wire import Buffer


class Stream(Protocol):
    """A connection, which it owns."""

    async def send(self, buffers: list[Buffer]) -> None:
        """All of ``buffers``. Raises ``OSError``."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Bytes received, 0 at the end. Raises ``OSError``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PlainStream:
    """A connected non-blocking socket."""

    sock: socket.socket

    async def send(self, buffers: list[Buffer]) -> None:
        await send_gathered(asyncio.get_running_loop(), self.sock, buffers)

    async def receive_into(self, buffer: memoryview) -> int:
        return await asyncio.get_running_loop().sock_recv_into(self.sock, buffer)

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True, slots=True)
class TlsStream:
    """A connection of asyncio's whose handshake is done."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.writer.write(buffer)
            await self.writer.drain()

    async def receive_into(self, buffer: memoryview) -> int:
        received = await self.reader.read(len(buffer))
        buffer[: len(received)] = received
        return len(received)

    def close(self) -> None:
        self.writer.transport.abort()
