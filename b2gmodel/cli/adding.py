"""How a command joins the line: its help ends in an example of itself, its exit codes, and the units of its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import typer

_ALWAYS: Final = {0: "done", 2: "wrong use", 4: "internal failure"}
_TIME: Final = "TIME: a number with its unit, ns, us, ms, s or min; 27.6ms."


def add_command(
    app: typer.Typer,
    function: Callable[..., Any],
    *,
    example: str,
    exits: Mapping[int, str] | None = None,
    name: str | None = None,
) -> None:
    """Add ``function`` to ``app``.

    Args:
        example: a whole command line.
        exits: an exit code -> what it means here, where that is more than it means everywhere.
        name: of the command; the function's own if None.
    """
    meanings = sorted((_ALWAYS | dict(exits or {})).items())
    codes = f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in meanings)}."
    # Annotations are still text here, as written, so that nothing is imported to read them.
    takes_time = any("metavar='TIME'" in str(annotation) for annotation in function.__annotations__.values())
    app.command(name, epilog="\n\n".join([*[_TIME] * takes_time, codes, f"Example: {example}"]))(function)
