"""The latest figures of the work at hand, for whoever shows progress.

Told between measured cycles and runs, never within one. Who listens is a matter of the context, as a progress bar
shows what is found many calls below it; where nobody listens nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latest:
    """Figures as they are known by now; None where they are not.

    Attributes:
        cycles: batches that they are of.
        flights: M.
        throughput_per_s: X, requests a second.
        service_s, transport_s: mean S and D of a batch.
    """

    cycles: int | None = None
    flights: int | None = None
    throughput_per_s: float | None = None
    service_s: float | None = None
    transport_s: float | None = None


_listener: ContextVar[Callable[[Latest], None] | None] = ContextVar("listener", default=None)


def tell(latest: Latest) -> None:
    """Hand it to whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(latest)


@contextmanager
def told_to(listener: Callable[[Latest], None]) -> Iterator[None]:
    """Until the end of the context ``listener`` gets what is told in it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
