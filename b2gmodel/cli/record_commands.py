"""Commands that need no server: mstar, validate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.options import Json, PredictionsFolder
from b2gmodel.cli.output import EXIT_CODES, say, say_json, table

if TYPE_CHECKING:
    from b2gmodel.records import HeightScore, Verdict


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: b2g mstar --service 27.6ms --transport 61.3ms")(mstar)
    app.command(epilog="Example: b2g validate predictions/NAME-DIGEST.json")(validate)


def mstar(
    service: Annotated[str, typer.Option("--service", help="Service time S of a batch, with its unit: 27.6ms.")],
    transport: Annotated[
        str,
        typer.Option("--transport", help="Transport overhead D of a batch, with its unit: 61.3ms; may be 0ms."),
    ],
    instances: Annotated[int, typer.Option("--instances", help="Model instances g.")] = 1,
    json: Json = False,
) -> None:
    """The closed form from two numbers: how many batches to keep in flight."""
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
    prediction: Annotated[str, typer.Argument(help="A frozen prediction: its file, or 8 digits of its digest.")],
    measurement: Annotated[
        Path | None, typer.Argument(help="The measurement. Default: the last one that the ledger knows.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Where to draw X(M): a .png, .svg or .pdf file.")
    ] = None,
    predictions: PredictionsFolder = Path("predictions"),
    json: Json = False,
) -> int:
    """Score a frozen prediction against its measurement: exit 0 held, 1 refuted, 3 inconclusive or invalid."""
    from b2gmodel.errors import UsageError
    from b2gmodel.judge import judge
    from b2gmodel.ledger import Ledger
    from b2gmodel.records import Measurement, digest_of
    from b2gmodel.store import read_record

    ledger = Ledger(predictions)
    frozen, digest = ledger.load_frozen(ledger.find(prediction))
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
    measured = read_record(path, Measurement)
    ledger.check_measurement(digest, path.name, digest_of(measured))
    verdict = judge(frozen, measured)
    verdict_path = ledger.enter_verdict(measured.name, verdict)
    if figure is not None:
        from b2gmodel.report.figure import draw_throughput

        draw_throughput([(frozen, measured)], figure)
    if json:
        say_json({"verdict": verdict.model_dump(mode="json"), "file": str(verdict_path)})
        return EXIT_CODES[verdict.outcome]
    say_verdict(verdict, figure)
    return EXIT_CODES[verdict.outcome]


def say_verdict(verdict: Verdict, figure: Path | None) -> None:
    """The verdict in the order of the design: the answer, a line a check, the heights, what to do next."""
    from b2gmodel.judge import USL

    say(f"{verdict.outcome}: {verdict.sentence}")
    for check in verdict.checks:
        say(f"  {check.outcome:<12}  {check.name}: {check.observed}; bound: {check.bound}")
    say(_heights_table(verdict))
    if any(score.predictor == USL for score in verdict.heights):
        say("note: usl was fitted to this very measurement: it saw the answer, and predicts nothing")
    for diagnostic in verdict.diagnostics:
        say(f"diagnostic {diagnostic.name}: {diagnostic.sentence}")
    if verdict.baseline_per_s is not None:
        say(f"without batching (C1): {verdict.baseline_per_s:.1f} request/s")
    if not verdict.preregistered:
        say("note: not pre-registered: these figures were measured before the prediction was made")
    if figure is not None:
        say(f"figure: {figure}")
    say(f"next: {_ADVICE[verdict.outcome].format(m=verdict.m_star, best=verdict.best_flights)}")


def _heights_table(verdict: Verdict) -> str:
    """A row an M: what was measured, and what each predictor promised there with its signed error."""
    names = list(dict.fromkeys(score.predictor for score in verdict.heights))
    by_flights: dict[int, dict[str, HeightScore]] = {}
    for score in verdict.heights:
        by_flights.setdefault(score.flights, {})[score.predictor] = score
    rows = []
    for flights, scores in sorted(by_flights.items()):
        one = next(iter(scores.values()))
        cells = [f"  {flights}", f"{one.measured_per_s:.1f}", _or_dash(one.measured_low), _or_dash(one.measured_high)]
        cells += [f"{scores[name].predicted_per_s:.1f} ({scores[name].error:+.1%})" for name in names]
        rows.append(tuple(cells))
    return table(rows, ("  M", "measured/s", "low 90 %", "high 90 %", *names))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


_ADVICE = {
    "held": "set M = {m} in your proxy",
    "refuted": "set M = {best}, where the measured peak is, and look for what the closed form leaves out",
    "inconclusive": "measure more sessions: b2g predict --sessions N, then b2g measure",
}
