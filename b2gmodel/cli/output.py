"""What commands say: results on stdout, progress and errors on stderr, JSON where asked for."""

from __future__ import annotations

import json
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
    """A function that shows a stage and the share done: a bar in a terminal, a line a stage elsewhere.

    The latest figures stand beside them (``live/latest.py``). It draws when it is called, at no other moment: what
    calls it does so between measured cycles.
    """
    if quiet:
        yield lambda _stage, _share: None
        return
    from b2gmodel.cli.live_view import progress_view
    from b2gmodel.live.latest import told_to

    with progress_view() as view, told_to(view.tell):
        yield view
