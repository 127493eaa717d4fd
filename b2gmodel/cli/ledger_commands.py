"""Commands on the ledger of predictions: status, verify, abandon. None needs a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import AllowedSigners, Json, PredictionsFolder
from b2gmodel.cli.output import say, say_json, table

if TYPE_CHECKING:
    from b2gmodel.ledger_states import State
    from b2gmodel.ledger_verify import Verification

UNSOUND = 3


def register(app: typer.Typer) -> None:
    ledger = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Show what was frozen, and what became of it."
    )
    add_command(ledger, status, example="b2g ledger status")
    add_command(
        ledger,
        verify,
        example="b2g ledger verify --allowed-signers allowed_signers",
        exits={0: "it holds", 3: "a check failed"},
    )
    add_command(ledger, abandon, example="b2g ledger abandon 1f2e3d4c --reason 'the server was taken away'")
    app.add_typer(ledger, name="ledger")


def status(predictions: PredictionsFolder = Path("predictions"), json: Json = False) -> None:
    """List the frozen predictions that have no outcome.

    All are counted: this is the file drawer.
    """
    from b2gmodel.ledger import Ledger
    from b2gmodel.ledger_states import count_states

    states = Ledger(predictions).states()
    counts = count_states(states)
    if json:
        say_json({"counts": counts, "predictions": [_fields(state) for state in states]})
        return
    say(f"{counts['open']} of {_plural(counts['frozen'], 'frozen prediction')} without an outcome")
    say(
        f"  judged {counts['judged']}, abandoned {counts['abandoned']}, measured and not judged {counts['measured']}, "
        f"not measured {counts['unmeasured']}"
    )
    if counts["unjudged_measurements"]:
        say(f"  measurements without a verdict: {counts['unjudged_measurements']}")
    if counts["unfinished_measurements"]:
        say(f"  measurements begun and not finished: {counts['unfinished_measurements']}")
    rows = [(f"  {state.file}", state.stage, state.frozen_at) for state in states if state.is_open]
    if rows:
        say(table(rows, ("  without an outcome", "stage", "frozen at")))
    for state in states:
        for begun in state.unfinished:
            say(f"begun and not finished: {begun.name}, begun at {begun.at}, of {state.file}")
        if state.stage == "abandoned":
            say(f"abandoned {state.file}: {state.reason}")
    say(f"next: {_advice(states)}")


def verify(
    allowed_signers: AllowedSigners = None, predictions: PredictionsFolder = Path("predictions"), json: Json = False
) -> int:
    """Check all that the ledger says, from its files alone."""
    from b2gmodel.ledger import Ledger
    from b2gmodel.ledger_verify import verify as verify_ledger

    verification = verify_ledger(Ledger(predictions), allowed_signers)
    if json:
        from dataclasses import asdict

        say_json({"holds": verification.holds, "failed": list(verification.failed)} | asdict(verification))
    else:
        _tell(verification)
    return 0 if verification.holds else UNSOUND


def abandon(
    prediction: Annotated[str, typer.Argument(help="A frozen prediction: its file, or 8 digits of its digest.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it will have no outcome, for everyone to read.")],
    predictions: PredictionsFolder = Path("predictions"),
    json: Json = False,
) -> None:
    """Enter that a prediction will not be judged, and why."""
    from b2gmodel.ledger import Ledger

    ledger = Ledger(predictions)
    path = ledger.find(prediction)
    _, digest = ledger.load_frozen(path)
    ledger.abandon(digest, reason)
    if json:
        say_json({"digest": digest, "file": path.name, "reason": reason})
        return
    say(f"abandoned: {path.name}")
    say(f"  reason: {reason}")
    say("next: b2g ledger status lists what is left without an outcome")


def _tell(verification: Verification) -> None:
    if verification.holds:
        say(f"the ledger holds: {_plural(verification.lines, 'line')}, no check failed")
    else:
        say(f"the ledger does not hold: {', '.join(verification.failed)} failed")
    for check in verification.checks:
        say(f"  {check.outcome:<11}  {check.name}: {check.observed}")
    for file in verification.strays:
        say(f"note: {file} is not in the ledger")
    if verification.holds:
        say("next: docs/preregistration.md says what this proves, and what it cannot")
    else:
        say("next: restore the files from their history, or do not believe what they say")


def _fields(state: State) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(state) | {"stage": state.stage, "unjudged": list(state.unjudged)}


def _advice(states: list[State]) -> str:
    waiting = next((state for state in states if state.is_open), None)
    if waiting is None:
        return "b2g ledger verify checks it all"
    digits = waiting.digest[:8]
    do = "measure and validate" if waiting.stage == "frozen" else "validate"
    return f"{do} {digits}, or b2g ledger abandon {digits} --reason TEXT"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
