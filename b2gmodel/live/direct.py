"""Callers straight on the transport, with no proxy between: placement D0.

Each request is a flight of its own, stamped as the gateway stamps its flights. It runs in one event loop and owns no
socket.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from b2gmodel.errors import ServerError
from b2gmodel.flights import Flight
from b2gmodel.live.tensors import Result
from b2gmodel.live.transport import Payload, Transport


class Direct:
    """Sends each request as it comes.

    Args:
        transport: carries requests to the server; the caller closes it.
        run_id: goes before the request's number in its id.
        on_flight: called when a request has its result, before its caller has it.
        flight_limit_s: a request without its result by then has failed.
    """

    def __init__(
        self, transport: Transport, *, run_id: str, on_flight: Callable[[Flight], None], flight_limit_s: float
    ) -> None:
        self._transport, self._run_id = transport, run_id
        self._on_flight, self._limit_s = on_flight, flight_limit_s
        self._numbers = itertools.count()

    async def submit(self, payload: Payload) -> Result:
        """One request's result. Raises ``ServerError`` where there is none."""
        number, sealed_ns = next(self._numbers), time.monotonic_ns()
        batch_id = f"{self._run_id}.{number}"
        try:
            async with asyncio.timeout(self._limit_s):
                delivery = await self._transport.infer(batch_id, (payload,))
        except TimeoutError:
            raise ServerError(
                "the server did not answer the request in time", allowed=f"{self._limit_s:g} s", where=batch_id
            ) from None
        delivered_ns = time.monotonic_ns()
        self._on_flight(Flight(number, 1, sealed_ns, sealed_ns, delivery.times, delivered_ns, False))
        return delivery.results[0]
