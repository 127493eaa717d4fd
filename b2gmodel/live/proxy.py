"""The proxy: a listening socket, the clients' connections, the payload pool and the gateway, with their bounds.

Rules that hold here:

* All memory that clients can make the proxy use is bounded, and ``MemoryBound`` says by what.
* Every request that is received ends once, and the counters of ``snapshot`` say how.
* Loopback only, unless clients come over TLS or the caller says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import Counter
from dataclasses import dataclass
from typing import Final

from b2gmodel.batcher import Policy
from b2gmodel.errors import SetupError, UsageError
from b2gmodel.flights import Flight
from b2gmodel.live.connection import Connection
from b2gmodel.live.contract import Contract
from b2gmodel.live.gateway import Gateway
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.observer import Outcome, ProxyObserver, Snapshot
from b2gmodel.live.pool import BufferPool
from b2gmodel.live.tls_listener import TlsListener
from b2gmodel.live.transport import Transport
from b2gmodel.live.wire import LOOKAHEAD_BYTES, ErrorCode

_BACKLOG: Final = 1024
_WRITE_HIGH_WATER_BYTES: Final = 64 * 1024
_CLOSE_S: Final = 5.0
_HANDSHAKES: Final = 128
_LONGEST_HANDSHAKE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Bounds that the clients are held to.

    Attributes:
        connections: clients at a time; one more is told BUSY and closed.
        client_requests: slots that one client may hold before it is no longer read; None for twice what all
            flights carry, 16 at least.
        frame_timeout_s: longest time for one frame to come in, or for a client to take nothing of its answers.
        idle_timeout_s: longest time that a client without an open request may stay silent; None for ever.
        unsent_bytes: answers that clients, taken together, have not taken yet; beyond it those that owe most
            are cut off.
        linger_s: how long a connection that we end is still read, so that its last answer arrives.
        flight_timeout_s: longest time for the server to answer a batch; None for ever.
    """

    connections: int = 1024
    client_requests: int | None = None
    frame_timeout_s: float = 30.0
    idle_timeout_s: float | None = 600.0
    unsent_bytes: int = 64 * 1024 * 1024
    linger_s: float = 1.0
    flight_timeout_s: float | None = 60.0

    @property
    def most_connections(self) -> int:
        """Clients, and those that are being told that they are too many."""
        return self.connections + max(16, self.connections // 8)

    def __post_init__(self) -> None:
        for name in ("connections", "client_requests", "frame_timeout_s", "idle_timeout_s", "unsent_bytes",
                     "flight_timeout_s"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError("a limit must be positive", observed=value, allowed="> 0", where=name)


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """What the clients can make the proxy hold at most, in bytes; the interpreter and its code come on top.

    Attributes:
        payloads: the pool; taken whole at the start.
        frames: heads of frames, and write buffers below the mark at which a client counts as slow.
        answers: results that were not taken; a view of one may keep its whole batch, hence times k.
    """

    payloads: int
    frames: int
    answers: int

    @property
    def total(self) -> int:
        return self.payloads + self.frames + self.answers


def slots_needed(policy: Policy) -> int:
    """Payload slots for a full queue and full flights: a request that finds none is told BUSY."""
    return policy.queue_limit + policy.batch_size * policy.flights


class Proxy:
    """Serves one model entry of one server to any number of clients.

    Args:
        model: the entry.
        policy: what to gather, and how many flights.
        transport: carries the batches, and gives the memory that payloads travel from best; the caller closes it.
        run_id: goes before the flight's number in the id of every batch.
        limits: what clients are held to.

    Raises:
        UsageError: the policy's batch is larger than the model takes, or an input has no fixed size.
    """

    def __init__(
        self,
        model: ModelSpec,
        policy: Policy,
        transport: Transport,
        *,
        run_id: str,
        limits: ProxyLimits = ProxyLimits(),
    ) -> None:
        most = max(1, model.max_batch_size)
        if policy.batch_size > most:
            raise UsageError(
                "the model does not take batches of this size",
                observed=policy.batch_size,
                allowed=f"1 to {most}",
                where=model.name,
            )
        self.model, self.policy, self.limits = model, policy, limits
        self.contract = Contract(model)
        slot_bytes = max(1, self.contract.payload_bytes)
        memory = transport.payload_memory(slots_needed(policy) * slot_bytes)
        self.pool = BufferPool(memory, slot_bytes, run=policy.batch_size)
        self.gateway = Gateway(
            policy, transport, run_id=run_id, on_flight=self._flight_ended, flight_limit_s=limits.flight_timeout_s
        )
        self.draining = False
        self.client_requests = limits.client_requests or max(16, 2 * policy.batch_size * policy.flights)
        self.linger_s = limits.linger_s
        self._observers: list[ProxyObserver] = []
        self._connections: set[Connection] = set()
        self._left = asyncio.Event()
        self._server: asyncio.Server | TlsListener | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._batch_sizes: Counter[int] = Counter()
        self._received = self._bytes_in = self._bytes_out = 0
        self._protocol_errors = self._shed = self._flights_failed = 0

    # the caller's side

    def add_observer(self, observer: ProxyObserver) -> None:
        """From now on ``observer`` is told of every request's and every flight's end."""
        self._observers.append(observer)

    async def start(
        self, host: str, port: int, *, allow_public: bool = False, tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Listen, port 0 for a free one; the address.

        Args:
            allow_public: listen where others can connect even without ``tls``.
            tls: what clients speak; None for plain TCP.

        Raises:
            UsageError: not a loopback address, without ``tls`` or ``allow_public``.
            SetupError: the address cannot be listened on.
        """
        if tls is None and not allow_public and not _is_loopback(host):
            raise UsageError(
                "this address can be reached from outside, and without TLS nothing is authenticated or encrypted",
                observed=host,
                allowed="127.0.0.1, ::1 or localhost",
                where="--listen",
                hint="give --tls-cert, --tls-key and --tls-client-ca, or --allow-public if the network is yours alone",
            )
        loop = asyncio.get_running_loop()
        try:
            self._server = await self._listen(host, port, tls)
        except (OSError, OverflowError) as error:
            raise SetupError(
                "cannot listen", observed=str(error), where=f"{host}:{port}", hint="is the port in use?"
            ) from error
        self._sweeper = loop.create_task(self._sweep_regularly())
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Server | TlsListener:
        def connection() -> Connection:
            return Connection(self)

        if tls is None:
            return await asyncio.get_running_loop().create_server(connection, host, port, backlog=_BACKLOG)
        longest_s = min(_LONGEST_HANDSHAKE_S, self.limits.frame_timeout_s)
        listener = TlsListener(tls, connection, handshakes=_HANDSHAKES, handshake_s=longest_s)
        listener.start(host, port, _BACKLOG)
        return listener

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new, finish what waits and flies, take leave of all clients.

        Requests that come meanwhile are told DRAINING. Returns whether all was finished within ``limit_s``;
        what was not is broken off then, and its clients are told INTERNAL.
        """
        self.draining = True
        if self._server is not None:
            self._server.close()
        finished = True
        try:
            async with asyncio.timeout(limit_s):
                await self.gateway.drain()
        except TimeoutError:
            finished = False
            await self.gateway.abort()
        await self.aclose()
        return finished

    async def aclose(self) -> None:
        """Stop listening, take leave of the clients and break off what is still open. Closing twice is harmless."""
        self.draining = True
        if self._server is not None:
            self._server.close()
            if isinstance(self._server, TlsListener):
                await self._server.wait_closed()
            self._server = None
        for connection in list(self._connections):
            connection.leave(ErrorCode.DRAINING, "the proxy is shutting down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.linger_s + _CLOSE_S):
                while self._connections:
                    self._left.clear()
                    await self._left.wait()
        for connection in list(self._connections):
            connection.abort()
        await self.gateway.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
            self._sweeper = None

    @property
    def memory_bound(self) -> MemoryBound:
        """What the clients can make the proxy hold at most."""
        per_connection = self.contract.limits.head_bytes + LOOKAHEAD_BYTES + _WRITE_HIGH_WATER_BYTES
        return MemoryBound(
            payloads=self.pool.memory.nbytes,
            frames=self.limits.most_connections * per_connection,
            answers=self.limits.unsent_bytes * self.policy.batch_size,
        )

    def snapshot(self) -> Snapshot:
        """Counters since the start, gauges now."""
        counts = self.gateway.batcher.counts
        return Snapshot(
            received=self._received,
            open=sum(connection.open_requests for connection in self._connections),
            outcomes=dict(self._outcomes),
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            protocol_errors=self._protocol_errors,
            shed_connections=self._shed,
            connections=len(self._connections),
            queue_depth=counts.waiting,
            in_flight=counts.in_flight,
            flights_in_use=self.gateway.batcher.flights_used,
            flights_limit=self.policy.flights,
            slots_in_use=self.pool.in_use,
            slots=self.pool.slots,
            unsent_bytes=self._unsent_bytes(),
            flights=self._batch_sizes.total(),
            flights_failed=self._flights_failed,
            batch_sizes=dict(self._batch_sizes),
        )

    # the connections' side (``connection.Host``)

    def joined(self, connection: Connection) -> str | None:
        """A client has connected; the reason why it has to leave, where it has."""
        self._connections.add(connection)
        if len(self._connections) > self.limits.most_connections:
            connection.abort()
        if len(self._connections) > self.limits.connections:
            return f"the proxy serves {self.limits.connections} clients at a time"
        return None

    def left(self, connection: Connection) -> None:
        """A client is gone."""
        self._connections.discard(connection)
        self._left.set()

    def received(self) -> None:
        """The head of one more request is there."""
        self._received += 1

    def ended(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        """A request has ended."""
        self._outcomes[outcome] += 1
        self._bytes_in += bytes_in
        self._bytes_out += bytes_out
        for observer in self._observers:
            observer.request_done(outcome, bytes_in, bytes_out)

    def broke_protocol(self) -> None:
        """A connection is being ended for what its client sent."""
        self._protocol_errors += 1

    def unread(self) -> None:
        """A client has been sent more while it does not read: cut off those that owe most, down to the bound."""
        while self._unsent_bytes() > self.limits.unsent_bytes:
            self._shed += 1
            max(self._connections, key=lambda connection: connection.unsent_bytes).abort()

    def _unsent_bytes(self) -> int:
        return sum(connection.unsent_bytes for connection in self._connections)

    def _flight_ended(self, flight: Flight) -> None:
        self._batch_sizes[flight.size] += 1
        self._flights_failed += flight.failed
        for observer in self._observers:
            observer.flight_done(flight)

    # time

    async def _sweep_regularly(self) -> None:
        shortest_s = min(self.limits.frame_timeout_s, self.limits.idle_timeout_s or self.limits.frame_timeout_s)
        while True:
            await asyncio.sleep(shortest_s / 4)
            self._sweep(asyncio.get_running_loop().time())

    def _sweep(self, now_s: float) -> None:
        """End the connections whose time is up. A timeout is kept to within a quarter of the shortest one."""
        patience_s, idle_s = self.limits.frame_timeout_s, self.limits.idle_timeout_s
        for connection in list(self._connections):
            begun_s = connection.frame_begun_s(now_s)
            if _is_over(connection.stalled_since_s, patience_s, now_s) or _is_over(
                connection.left_s, patience_s, now_s
            ):
                connection.abort()
            elif _is_over(begun_s, patience_s, now_s):
                connection.break_off(f"the frame was not whole after {patience_s:g} s")
            elif idle_s is not None and begun_s is None and _is_over(connection.idle_since_s, idle_s, now_s):
                connection.leave(ErrorCode.DEADLINE, f"no request came in {idle_s:g} s")


def _is_over(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= limit_s


def _is_loopback(host: str) -> bool:
    """Whether every address of ``host`` is a loopback one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError("not an address to listen on", observed=host, where="--listen") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
