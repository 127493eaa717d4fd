"""The proxy's core: the batching policy on one side, a transport on the other, and a stamp at every stage.

The policy decides (``batcher.py``, which the simulation drives, too); this file reads the clock, starts flights and
hands results back. It runs in one event loop and owns no socket.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from b2gmodel.batcher import Action, Answer, Batcher, Drop, Expire, Fail, Launch, Policy, RefusalReason, Refuse
from b2gmodel.errors import B2GError, ServerError
from b2gmodel.flights import ExchangeTimes, Flight
from b2gmodel.live.tensors import Result
from b2gmodel.live.transport import Delivery, Payload, Transport


class RefusedError(B2GError):
    """The proxy did not take the request: its queue is full, it drains, or the deadline had passed."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__("the proxy refused the request", observed=str(reason))
        self.reason = reason


class ExpiredError(B2GError):
    """The request's deadline came while it waited."""


Ended = Callable[[Result | B2GError | None], None]
"""Told how a request ended: its result, why there is none, or None where it had been cancelled."""


@dataclass(slots=True)
class _Pending:
    payload: Payload
    ended: Ended


class Gateway:
    """Takes requests, sends batches.

    Args:
        policy: what to gather, and how many flights.
        transport: carries batches to the server; the caller closes it.
        run_id: goes before the flight's number in the id of every batch sent to the server.
        on_flight: called when a flight has ended, after its callers have their results.
        flight_limit_s: a flight without its results by then has failed; None waits for ever.
    """

    def __init__(
        self,
        policy: Policy,
        transport: Transport,
        *,
        run_id: str,
        on_flight: Callable[[Flight], None],
        flight_limit_s: float | None = None,
    ) -> None:
        self._batcher: Batcher[int] = Batcher(policy)
        self._transport = transport
        self._run_id = run_id
        self._on_flight = on_flight
        self._flight_limit_s = flight_limit_s
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._flights: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def batcher(self) -> Batcher[int]:
        """For counts and flights in use; events go through the gateway."""
        return self._batcher

    async def submit(self, payload: Payload, deadline_ns: int | None = None) -> Result:
        """One request's result.

        Args:
            payload: must not change until this returns; after a cancellation, a flight may still send from it.
            deadline_ns: on the monotonic clock; too late to send from then on.

        Raises:
            RefusedError, ExpiredError: not sent.
            ServerError: the request's flight failed.
        """
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def ended(outcome: Result | B2GError | None) -> None:
            if answer.done():
                return
            if isinstance(outcome, B2GError):
                answer.set_exception(outcome)
            elif outcome is not None:
                answer.set_result(outcome)

        number = self.begin(payload, deadline_ns, ended)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancel(number)
            raise

    def begin(self, payload: Payload, deadline_ns: int | None, ended: Ended) -> int:
        """Hand a request in; its number, for ``cancel``.

        Args:
            payload: must not change until ``ended`` is called: no flight uses it from then on.
            deadline_ns: on the monotonic clock; too late to send from then on.
            ended: called once, possibly before this returns; must not raise.
        """
        number = next(self._numbers)
        self._pending[number] = _Pending(payload, ended)
        self._act(self._batcher.arrive(number, time.monotonic_ns(), deadline_ns))
        return number

    def cancel(self, number: int) -> None:
        """Nobody wants this request's result any longer. It ends at once, or with its flight; if it has, no matter."""
        self._act(self._batcher.cancel(number, time.monotonic_ns()))

    async def drain(self) -> None:
        """Refuse what comes, send what waits, return when all flights have ended."""
        self._act(self._batcher.drain(time.monotonic_ns()))
        while self._flights:
            await asyncio.wait(self._flights)

    async def abort(self) -> None:
        """Break every flight off, those that ``drain`` still launches, too. Return when all have ended."""
        self._act(self._batcher.drain(time.monotonic_ns()))
        while self._flights:
            await asyncio.sleep(0)  # a task that is cancelled before its first step would never end its flight
            for flight in self._flights:
                flight.cancel()
            await asyncio.gather(*self._flights, return_exceptions=True)

    def _act(self, actions: tuple[Action[int], ...], delivered: tuple[Result, ...] | B2GError = ()) -> None:
        """Carry out what the policy decided; ``delivered`` is what the flight that ended brought."""
        for action in actions:
            match action:
                case Launch():
                    flight = asyncio.get_running_loop().create_task(self._fly(action))
                    self._flights.add(flight)
                    flight.add_done_callback(self._flights.discard)
                case Answer(number, _, row):
                    assert isinstance(delivered, tuple)
                    self._settle(number, delivered[row])
                case Fail(number):
                    assert isinstance(delivered, B2GError)
                    self._settle(number, delivered)
                case Refuse(number, reason):
                    self._settle(number, RefusedError(reason))
                case Expire(number):
                    self._settle(number, ExpiredError("the request's deadline came while it waited"))
                case Drop(number):
                    self._settle(number, None)
        self._set_timer()

    def _settle(self, number: int, outcome: Result | B2GError | None) -> None:
        self._pending.pop(number).ended(outcome)

    async def _fly(self, launch: Launch[int]) -> None:
        payloads = [self._pending[number].payload for number in launch.request_ids]
        times, failed = ExchangeTimes(), False
        try:
            delivery = await self._carry(f"{self._run_id}.{launch.flight_id}", payloads)
        except B2GError as error:
            failed = True
            self._act(self._batcher.flight_failed(launch.flight_id, time.monotonic_ns()), error)
        except BaseException:
            # Ours, or a cancellation from above: the callers are told all the same, then it goes on its way.
            fault = B2GError("the flight was broken off inside the proxy")
            self._act(self._batcher.flight_failed(launch.flight_id, time.monotonic_ns()), fault)
            raise
        else:
            times = delivery.times
            self._act(self._batcher.flight_done(launch.flight_id, time.monotonic_ns()), delivery.results)
        self._on_flight(
            Flight(
                launch.flight_id,
                len(launch.request_ids),
                launch.oldest_arrival_ns,
                launch.sealed_ns,
                times,
                time.monotonic_ns(),
                failed,
            )
        )

    async def _carry(self, batch_id: str, payloads: list[Payload]) -> Delivery:
        if self._flight_limit_s is None:
            return await self._transport.infer(batch_id, payloads)
        try:
            async with asyncio.timeout(self._flight_limit_s):
                return await self._transport.infer(batch_id, payloads)
        except TimeoutError:
            raise ServerError(
                "the server did not answer the batch in time", allowed=f"{self._flight_limit_s:g} s", where=batch_id
            ) from None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_ns = self._batcher.next_wake_ns
        if wake_ns is not None:
            delay_s = max(0, wake_ns - time.monotonic_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._act(self._batcher.tick(time.monotonic_ns()))
