"""The command line: parses, calls, prints. Commands import what they need when they run, so that help is quick."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from b2gmodel import __version__
from b2gmodel.cli import (
    advise_command,
    import_commands,
    ledger_commands,
    live_commands,
    load_commands,
    predict_command,
    record_commands,
    report_command,
    serve_commands,
    server_commands,
    simulate_commands,
    study_commands,
    study_judge_commands,
)
from b2gmodel.cli.output import complain
from b2gmodel.errors import B2GError

INTERRUPTED = 130

app = typer.Typer(
    name="b2g",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="From one single-flight calibration: where to batch, and how many batches to keep in flight.\n\n"
    "Exit codes: 0 held or done, 1 refuted, 2 usage, 3 evidence invalid or inconclusive, 4 internal failure.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before any command."""


record_commands.register(app)
report_command.register(app)
predict_command.register(app)
advise_command.register(app)
import_commands.register(app)
live_commands.register(app)
server_commands.register(app)
simulate_commands.register(app)
serve_commands.register(app)
load_commands.register(app)
study_commands.register(app)
study_judge_commands.register()
ledger_commands.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``b2g`` and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``b2g``; the exit code. Every error is one line on stderr."""
    try:
        # No arguments at all ask for help, too: on stdout, line by line.
        result = app(args=(sys.argv[1:] if arguments is None else list(arguments)) or ["--help"], standalone_mode=False)
    except B2GError as error:
        complain(error.line())
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except typer.Abort:
        complain("interrupted")
        return INTERRUPTED
    except typer.Exit as leave:
        return leave.exit_code
    except (BrokenPipeError, SystemExit):
        # Nobody reads on; the parser would exit 1 for it, which is a verdict here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        # The parser's own errors know how to say what was mistyped; all others are ours.
        message = getattr(error, "format_message", None)
        if message is not None:
            complain(str(message()))
            return 2
        if os.environ.get("B2G_DEBUG"):
            traceback.print_exc()
        complain(f"internal failure: {type(error).__name__}: {error}; set B2G_DEBUG=1 for the traceback")
        return 4
    if result == INTERRUPTED:
        complain("interrupted")
    return result if isinstance(result, int) else 0
