"""Sending a list of buffers over a non-blocking socket without joining them.

Rules: no payload byte is copied in user space; the loop is given back between system calls, so that other
flights make progress while the peer drains its buffer. Works on asyncio and on uvloop.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

# The kernel takes at most 1,024 pieces a call (UIO_MAXIOV).
_PIECES_PER_CALL: Final = 1024


async def send_gathered(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, buffers: Iterable[bytes | bytearray | memoryview]
) -> None:
    """Send all bytes of ``buffers``, in order.

    Args:
        loop: the running loop.
        sock: connected and non-blocking, owned by the caller alone (not by an asyncio transport).
        buffers: C-contiguous; must not change before this returns.

    Raises:
        OSError: as ``socket.sendmsg`` does.
    """
    pending = deque(view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes)
    while pending:
        try:
            sent = sock.sendmsg(list(islice(pending, _PIECES_PER_CALL)))
        except BlockingIOError:
            sent = 0
        while pending and sent >= pending[0].nbytes:
            sent -= pending.popleft().nbytes
        if pending:
            pending[0] = pending[0][sent:]
            await _writable(loop, sock)


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _mark_ready, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _mark_ready(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
