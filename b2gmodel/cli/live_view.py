"""What is seen while something runs: a view in a terminal, a line now and then elsewhere.

Rules of this module: all of it goes to stderr. A view is drawn four times a second at most. The proxy's is drawn in a
thread of its own, so that a terminal or a pipe that takes nothing holds up no request; that of a long command when
the command calls, which it does between measured cycles. However a program ends, its terminal shows the cursor.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import typer

from b2gmodel.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from b2gmodel.live.latest import Latest
    from b2gmodel.live.observer import Outcome
    from b2gmodel.live.pulse import Vitals

TERMINAL_S: Final = 0.5
PLAIN_S: Final = 5.0
"""Between two readings of a proxy, in a terminal and elsewhere."""

_LEAST_S: Final = 0.25
_PATIENCE_S: Final = 1.0
_BARS: Final = "▁▂▃▄▅▆▇█"
_HISTORY: Final = 24
# Before that a start's self-test and warm-up are most of what was seen, and the rest cannot be told from it.
_LEAST_SHARE: Final = 0.10
_SHOW_CURSOR: Final = b"\r\x1b[J\x1b[?25h"


@contextmanager
def live_view() -> Iterator[tuple[Callable[[Vitals], None], float]]:
    """What to call with each reading of a proxy, and how often, in seconds."""
    with _terminal() as console:
        if console is None:
            with _apart(_PlainView()) as show:
                yield show, PLAIN_S
            return
        from rich.live import Live

        history: deque[float] = deque(maxlen=_HISTORY)
        with Live("", console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:

            def draw(vitals: Vitals) -> None:
                history.append(vitals.throughput_per_s)
                live.update(_panel(vitals, "" if console.options.ascii_only else sparkline(history)), refresh=True)

            with _apart(draw) as show:
                yield show, TERMINAL_S


class ProgressView(Protocol):
    """Shows how far a command is."""

    def __call__(self, stage: str, share: float) -> None:
        """The stage, and the share of all that is done."""
        ...

    def tell(self, latest: Latest) -> None:
        """Figures to stand beside it from the next call on."""
        ...


@contextmanager
def progress_view() -> Iterator[ProgressView]:
    """How far a long command is."""
    with _terminal() as console:
        if console is None:
            yield _PlainProgress()
            return
        view = _BarProgress(console)
        with view.bar:
            yield view


def facts(vitals: Vitals) -> list[tuple[str, str]]:
    """Names and values, in the order in which they are shown."""
    service, transport = _time(vitals.service_s), _time(vitals.transport_s)
    if vitals.busy is not None:
        service += f", instances {vitals.busy:.0%} busy"
    if vitals.transport_share is not None:
        transport += f", {vitals.transport_share:.0%} of C"
    return [
        ("X", f"{vitals.throughput_per_s:.1f} request/s"),
        ("queue", f"{vitals.queue} of {vitals.queue_limit}"),
        ("flights", f"{vitals.flights:.1f} of {vitals.flights_limit}"),
        ("C", _time(vitals.cycle_s)),
        ("S", service),
        ("D", transport),
        ("ended", ended(vitals.outcomes.items())),
        ("binds", str(vitals.binds)),
    ]


def ended(outcomes: Iterable[tuple[Outcome, int]], between: str = ", ") -> str:
    """How many requests ended how: ``1200 answered, 17 busy``."""
    return between.join(f"{count} {outcome}" for outcome, count in outcomes if count or outcome == "answered")


def sparkline(values: Iterable[float]) -> str:
    """The values as bars, the highest full."""
    listed = list(values)
    most = max(listed, default=0.0)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else _BARS[0] for value in listed)


def figures(latest: Latest) -> str:
    """What is known, on a line: ``120 cycles, M = 1, X 71.2 request/s, S 27.6 ms, D 61.3 ms``."""
    x = latest.throughput_per_s
    parts = (
        None if latest.cycles is None else f"{latest.cycles} cycles",
        None if latest.flights is None else f"M = {latest.flights}",
        None if x is None else f"X {x:.1f} request/s",
        None if latest.service_s is None else f"S {_time(latest.service_s)}",
        None if latest.transport_s is None else f"D {_time(latest.transport_s)}",
    )
    return ", ".join(part for part in parts if part is not None)


def _panel(vitals: Vitals, trend: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    panel = Table.grid(padding=(0, 2))
    panel.add_column(style="dim", no_wrap=True)
    panel.add_column(overflow="fold")
    for name, value in facts(vitals):
        panel.add_row(name, Text(value, style="bold" if name in ("X", "binds") else ""))
        if name == "X" and trend:
            panel.add_row("", Text(trend, style="cyan", no_wrap=True, overflow="crop"))
    return panel


def _time(seconds: float | None) -> str:
    """Three digits are what the eye takes in of a figure that moves."""
    return "-" if seconds is None else format_duration(float(f"{seconds:.3g}"))


class _PlainView:
    """One line a reading, while something happens."""

    def __init__(self) -> None:
        self._ended = 0
        self._idle = True

    def __call__(self, vitals: Vitals) -> None:
        total = sum(vitals.outcomes.values())
        idle = vitals.flights == 0 and vitals.queue == 0 and total == self._ended
        if not (idle and self._idle):
            typer.echo("  " + "; ".join(f"{name} {value}" for name, value in facts(vitals)), err=True)
        self._ended, self._idle = total, idle


class _PlainProgress:
    """One line for each new stage, with the time that it should still take and the figures of the last one."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._stage = self._figures = ""

    def __call__(self, stage: str, share: float) -> None:
        if stage == self._stage:
            return
        self._stage = stage
        elapsed_s = time.monotonic() - self._begin_s
        left = f", about {elapsed_s * (1 - share) / share:.0f} s left" if share >= _LEAST_SHARE else ""
        last, self._figures = f"; last: {self._figures}" if self._figures else "", ""
        typer.echo(f"  {share:4.0%}  {stage}{left}{last}", err=True)

    def tell(self, latest: Latest) -> None:
        self._figures = figures(latest)


class _BarProgress:
    """The stage, a bar with times, and the latest figures: a line each."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.text import Text

        view = self
        self._stage = self._figures = ""

        class Bar(Progress):
            def get_renderables(self) -> Iterator[RenderableType]:
                yield Text(view._stage, no_wrap=True, overflow="ellipsis")
                yield self.make_tasks_table(self.tasks)
                yield Text(view._figures, overflow="fold")

        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn(compact=True))
        self.bar = Bar(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False)
        self._task = self.bar.add_task("", total=1.0)
        self._drawn_s = 0.0

    def __call__(self, stage: str, share: float) -> None:
        self._stage = stage
        self.bar.update(self._task, completed=share)
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _LEAST_S:
            self._drawn_s = now_s
            self.bar.refresh()

    def tell(self, latest: Latest) -> None:
        self._figures = figures(latest)


@contextmanager
def _terminal() -> Iterator[Console | None]:
    """A console on stderr where one can draw, and its cursor again whatever ends the program; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_dumb_terminal or not console.is_terminal:
        yield None
        return

    def end(number: int, _frame: object) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield console
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _apart(show: Callable[[Vitals], None]) -> Iterator[Callable[[Vitals], None]]:
    """``show`` in a thread of its own; a reading that comes while one is shown yet and one waits is left out."""
    waiting: queue.Queue[Vitals | None] = queue.Queue(1)

    def work() -> None:
        with suppress(OSError):  # whoever watched has closed their terminal
            while (vitals := waiting.get()) is not None:
                show(vitals)

    def hand_over(vitals: Vitals) -> None:
        with suppress(queue.Full):
            waiting.put_nowait(vitals)

    thread = threading.Thread(target=work, name="live view", daemon=True)
    thread.start()
    try:
        yield hand_over
    finally:
        with suppress(queue.Full):
            waiting.put(None, timeout=_PATIENCE_S)
        thread.join(_PATIENCE_S)
