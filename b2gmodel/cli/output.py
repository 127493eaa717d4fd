"""What commands say: results on stdout, progress and errors on stderr, JSON where asked for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

EXIT_CODES = {"held": 0, "refuted": 1, "inconclusive": 3, "invalid": 3}


def say(text: str = "") -> None:
    typer.echo(text)


def complain(text: str) -> None:
    """One line on stderr."""
    typer.echo(f"b2g: {' '.join(text.split())}", err=True)


def say_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, keys sorted."""
    typer.echo(json.dumps(value, sort_keys=True, ensure_ascii=False))


def table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Columns aligned to the right, the first to the left."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in (header, *rows))


@contextmanager
def progress_lines(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A function that shows a stage and the share done: a bar in a terminal, a line a stage elsewhere."""
    if quiet:
        yield lambda _stage, _share: None
        return
    if not sys.stderr.isatty():
        yield _PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


class _PlainProgress:
    """One line for each new stage, with the time that it should still take."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._stage = ""

    def __call__(self, stage: str, share: float) -> None:
        if stage == self._stage:
            return
        self._stage = stage
        elapsed_s = time.monotonic() - self._begin_s
        left = f", about {elapsed_s * (1 - share) / share:.0f} s left" if share > 0.02 else ""
        typer.echo(f"  {share:4.0%}  {stage}{left}", err=True)
