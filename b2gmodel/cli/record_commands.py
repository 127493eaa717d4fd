"""Commands that need no server: mstar, validate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import AllowedSigners, Json, PredictionsFolder
from b2gmodel.cli.output import EXIT_CODES, say, say_json

if TYPE_CHECKING:
    from b2gmodel.ledger import Ledger
    from b2gmodel.placement_records import StudyPrediction, StudyVerdict
    from b2gmodel.records import Verdict


def register(app: typer.Typer) -> None:
    add_command(app, mstar, example="b2g mstar --service 27.6ms --transport 61.3ms")
    add_command(
        app,
        validate,
        example="b2g validate predictions/NAME-DIGEST.json",
        exits={0: "held", 1: "refuted", 3: "inconclusive or invalid"},
    )


def mstar(
    service: Annotated[str, typer.Option("--service", metavar="TIME", help="Service time S of a batch.")],
    transport: Annotated[
        str,
        typer.Option("--transport", metavar="TIME", help="Transport overhead D of a batch; 0ms for none."),
    ],
    instances: Annotated[int, typer.Option("--instances", help="Model instances g.")] = 1,
    json: Json = False,
) -> None:
    """Say how many batches to keep in flight, from S and D alone."""
    from b2gmodel import closed_form
    from b2gmodel.units import format_duration, parse_duration_s

    answer = closed_form.mstar(
        parse_duration_s(service, where="--service"),
        parse_duration_s(transport, where="--transport", allow_zero=True),
        instances,
    )
    if json:
        from dataclasses import asdict

        say_json(asdict(answer))
        return
    say(f"M* = {answer.m_star}")
    say(f"  {answer.why}")
    say(f"  cycle {format_duration(answer.cycle_s)}, transport share {answer.transport_share:.1%}, g = {instances}")
    say(
        f"  batches a second: {answer.single_flight_rate_per_s:.4g} with one in flight, "
        f"at most {answer.saturation_rate_per_s:.4g} at M* (an upper bound: transports that share a processor or a "
        "link overlap less)"
    )
    say("next: b2g calibrate measures S and D on your server")


def validate(
    prediction: Annotated[
        str | None, typer.Argument(help="A frozen prediction: its file, or 8 digits of its digest.")
    ] = None,
    measurement: Annotated[
        Path | None, typer.Argument(help="The measurement. Default: the last one that the ledger knows.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Where to draw X(M): a .png, .svg or .pdf file.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Each predictor's record over all verdicts, and what has none.")
    ] = False,
    allowed_signers: AllowedSigners = None,
    predictions: PredictionsFolder = Path("predictions"),
    json: Json = False,
) -> int:
    """Judge a frozen prediction by its measurement."""
    from b2gmodel.cli.verdict_text import say_verdict
    from b2gmodel.errors import UsageError
    from b2gmodel.judge import judge
    from b2gmodel.ledger import Ledger
    from b2gmodel.ledger_verify import signer_of
    from b2gmodel.placement_records import StudyPrediction
    from b2gmodel.records import Measurement, digest_of
    from b2gmodel.store import read_record

    ledger = Ledger(predictions)
    if whole:
        if prediction is not None or figure is not None:
            raise UsageError("--all is about every prediction in the ledger", where="--all", hint="name none with it")
        return _validate_all(ledger, json)
    if prediction is None:
        raise UsageError("which prediction?", where="PREDICTION", hint="name one, or ask for --all")
    frozen, digest = ledger.load_frozen_any(ledger.find(prediction))
    signer = None if allowed_signers is None else signer_of(ledger, digest, allowed_signers)
    path = measurement
    if path is None:
        known = [entry.file for entry in ledger.entries() if entry.event == "measure" and entry.digest == digest]
        if not known:
            raise UsageError(
                "this prediction has not been measured",
                where=prediction,
                hint=f"run b2g measure {prediction}, or name a measurement",
            )
        path = predictions / known[-1]
    if isinstance(frozen, StudyPrediction):
        return _validate_study(ledger, frozen, digest, path, json=json)
    measured = read_record(path, Measurement)
    ledger.check_measurement(digest, path.name, digest_of(measured))
    verdict = judge(frozen, measured)
    verdict_path = ledger.enter_verdict(measured.name, verdict)
    if figure is not None:
        from b2gmodel.report.figure import draw_throughput

        draw_throughput([(frozen, measured)], figure)
    if json:
        # The name alone: the same records in another folder give the same answer, byte for byte.
        say_json({"verdict": verdict.model_dump(mode="json"), "file": verdict_path.name, "signer": signer})
        return EXIT_CODES[verdict.outcome]
    say_verdict(verdict, frozen, predictions, figure)
    if signer is not None:
        say(f"signed by {signer}")
    return EXIT_CODES[verdict.outcome]


def _validate_study(ledger: Ledger, frozen: StudyPrediction, digest: str, path: Path, *, json: bool) -> int:
    """A study's prediction, against the measurement that was gathered from its runs."""
    from b2gmodel.cli.study_judge_commands import say_study_verdict
    from b2gmodel.placement_records import StudyMeasurement
    from b2gmodel.records import digest_of
    from b2gmodel.store import read_record
    from b2gmodel.study_judge import judge_study

    measured = read_record(path, StudyMeasurement)
    ledger.check_measurement(digest, path.name, digest_of(measured))
    verdict = judge_study(frozen, measured)
    file = ledger.enter_verdict(measured.name, verdict)
    if json:
        say_json({"verdict": verdict.model_dump(mode="json"), "file": file.name})
    else:
        say_study_verdict(verdict)
    return EXIT_CODES[verdict.outcome]


def _validate_all(ledger: Ledger, json: bool) -> int:
    """The file drawer first: what was frozen and has no outcome; then what all verdicts come to."""
    from b2gmodel.cli.verdict_text import scores_table
    from b2gmodel.records import Verdict
    from b2gmodel.scores import track_record

    states = ledger.states()
    without = [state.digest for state in states if state.is_open]
    abandoned = [state.digest for state in states if state.stage == "abandoned"]
    unfinished = [begun.name for state in states for begun in state.unfinished]
    verdicts = _verdicts(ledger)
    record = track_record([verdict for verdict in verdicts if isinstance(verdict, Verdict)])
    outcomes = {name: sum(verdict.outcome == name for verdict in verdicts) for name in EXIT_CODES}
    if json:
        say_json(
            {
                "frozen": len(states),
                "without_outcome": without,
                "abandoned": abandoned,
                "unfinished": unfinished,
                "outcomes": outcomes,
                "predictors": [score.model_dump(mode="json") for score in record],
            }
        )
        return 0
    dropped = f", {len(abandoned)} abandoned" if abandoned else ""
    begun = f", measurements begun and not finished: {len(unfinished)}" if unfinished else ""
    counted = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    plural = "prediction has" if len(states) == 1 else "predictions have"
    say(f"{len(without)} of {len(states)} frozen {plural} no outcome{dropped}{begun}; verdicts: {counted}")
    for digest in without:
        say(f"  without outcome: {digest}")
    for name in unfinished:
        say(f"  begun and not finished: {name}")
    if record:
        say(scores_table(record))
        say("note: over all verdicts and M > 1, in shares of the measured X(M); skill is in CRPS")
    if without:
        say(f"next: b2g measure {without[0][:8]}, then b2g validate {without[0][:8]}")
    return 0


def _verdicts(ledger: Ledger) -> list[Verdict | StudyVerdict]:
    """Those that the ledger entered; of several on one measurement the last."""
    entered = {
        (entry.digest, entry.facts.get("measurement")): entry for entry in ledger.entries() if entry.event == "outcome"
    }
    return [ledger.entered_verdict(entry) for entry in entered.values()]
