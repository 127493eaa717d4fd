"""What a run used: processor time of this process and of the server, bytes on the sockets between the two.

The kernel's own counters, read before a run and after it; nothing is counted on the way. Bytes are those of all this
process's connections to the server's ports, as the peer's kernel has acknowledged them or ours has received them:
heads and bodies, without TCP's and IP's own. Payloads in shared memory cross no socket.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from b2gmodel.live.cpu import cpu_time_ns, listening_process, process_tree
from b2gmodel.live.target import Endpoint
from b2gmodel.units import s_from_ns

# struct tcp_info of linux/tcp.h: two 64-bit counters after 24 32-bit words and the two pacing rates.
_TCP_INFO_BYTES: Final = 192
_ACKED_AND_RECEIVED: Final = struct.Struct("QQ")
_ACKED_OFFSET: Final = 120


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds and bytes; None where the system does not tell."""

    ours_s: float
    server_s: float | None
    sent_bytes: int | None
    received_bytes: int | None

    def since(self, before: Usage) -> Usage:
        """What was added since ``before``."""
        return Usage(
            self.ours_s - before.ours_s,
            None if self.server_s is None or before.server_s is None else self.server_s - before.server_s,
            _added(self.sent_bytes, before.sent_bytes),
            _added(self.received_bytes, before.received_bytes),
        )


class Meter:
    """Reads what this process and a server on this host have used so far.

    Args:
        endpoint: the server. Its process is looked for once; one that starts children later needs a new meter.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._ports = {endpoint.port, endpoint.grpc_port} - {None}
        root = listening_process(endpoint.port) if _is_local(endpoint.host) else None
        self._server: Sequence[int] | None = None if root is None else process_tree(root)

    def read(self) -> Usage:
        """All counters now."""
        traffic = self._traffic()
        return Usage(time.process_time(), self._server_s(), *(traffic or (None, None)))

    def _server_s(self) -> float | None:
        if self._server is None:
            return None
        used_ns = [cpu_time_ns(pid) for pid in self._server]
        # A process that has ended takes its clock with it: then the sum would run backwards.
        return None if None in used_ns else s_from_ns(sum(each for each in used_ns if each is not None))

    def _traffic(self) -> tuple[int, int] | None:
        """Bytes sent and received over all our connections to the server; None where the kernel does not count."""
        sent = received = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    continue
                descriptor = os.dup(int(name))
            except OSError:
                continue  # gone
            with socket.socket(fileno=descriptor) as connection:
                counted = self._of_one(connection)
            if counted is None:
                return None
            sent, received = sent + counted[0], received + counted[1]
        return sent, received

    def _of_one(self, connection: socket.socket) -> tuple[int, int] | None:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0, 0
        try:
            if connection.getpeername()[1] not in self._ports:
                return 0, 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return 0, 0  # it listens, or has just been closed
        if len(info) < _ACKED_OFFSET + _ACKED_AND_RECEIVED.size:
            return None
        acked, received = _ACKED_AND_RECEIVED.unpack_from(info, _ACKED_OFFSET)
        return acked, received


def _added(after: int | None, before: int | None) -> int | None:
    # A connection that was closed meanwhile takes its counters with it.
    return None if after is None or before is None or after < before else after - before


def _is_local(host: str) -> bool:
    """Whether the host's address is one of this machine's own."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
