"""Commands that need no server: mstar, predict, validate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.options import LARGEST_SEED, Json, PredictionsFolder, parse_counts
from b2gmodel.cli.output import EXIT_CODES, say, say_json, table

if TYPE_CHECKING:
    from b2gmodel.records import Verdict


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: b2g mstar --service 27.6ms --transport 61.3ms")(mstar)
    app.command(epilog="Example: b2g predict calibration/published/yolov8n.json")(predict)
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


def predict(
    calibration: Annotated[Path, typer.Argument(help="A calibration, calibration/NAME.json.", show_default=False)],
    k: Annotated[
        int | None, typer.Option("-k", help="Batch size to predict for. Default: the largest calibrated.")
    ] = None,
    flights: Annotated[str, typer.Option("--flights", help="Flights M that the measurement will run.")] = "1,2,3,4,6,8",
    sessions: Annotated[int, typer.Option("--sessions", min=1, max=1000, help="Sessions of the measurement.")] = 4,
    seconds: Annotated[
        str, typer.Option("--seconds", help="Length of each run of the measurement, with its unit.")
    ] = "2s",
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of the bootstrap and of the order of runs.")
    ] = 1,
    name: Annotated[str | None, typer.Option("--name", help="Name of the prediction.")] = None,
    predictions: PredictionsFolder = Path("predictions"),
    json: Json = False,
) -> None:
    """Predict M* and X(M) from a calibration, and freeze the prediction in the ledger."""
    from b2gmodel.ledger import Ledger
    from b2gmodel.live.host import describe_software
    from b2gmodel.predict import predict as make_prediction
    from b2gmodel.records import Calibration, Plan, digest_of
    from b2gmodel.store import check_name, read_record
    from b2gmodel.units import parse_duration_s

    if name is not None:
        check_name(name, where="--name")
    source = read_record(calibration, Calibration)
    plan = Plan(
        flights=parse_counts(flights, where="--flights"),
        sessions=sessions,
        seconds_per_run=parse_duration_s(seconds, where="--seconds"),
        baseline_concurrency=8,
        order_seed=seed,
    )
    prediction = make_prediction(source, k=k, plan=plan, software=describe_software(), name=name, seed=seed)
    path = Ledger(predictions).freeze(prediction)
    result = prediction.predictors[0]
    if json:
        say_json(
            {
                "digest": digest_of(prediction),
                "file": str(path),
                "prediction": prediction.model_dump(mode="json"),
            }
        )
        return
    say(f"M* = {result.m_star}: keep {result.m_star} batches in flight ({result.name})")
    if result.m_star_probabilities is not None:
        shares = ", ".join(f"M* = {m}: {share:.0%}" for m, share in result.m_star_probabilities.items())
        say(f"  over the calibration's own uncertainty: {shares}")
    rows = [
        (
            f"  {point.flights}",
            f"{point.throughput_per_s:.1f}",
            "-" if point.low is None else f"{point.low:.1f}",
            "-" if point.high is None else f"{point.high:.1f}",
        )
        for point in result.curve
    ]
    say(table(rows, ("  M", "request/s", "low 90 %", "high 90 %")))
    for note in prediction.notes:
        say(f"note: {note}")
    say(f"frozen: {path}")
    say(f"next: {_what_next(prediction.server is not None, path)}")


def _what_next(measurable: bool, path: Path) -> str:
    return f"b2g measure {path}" if measurable else f"b2g validate {path} MEASUREMENT"


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
    say(f"{verdict.outcome}: {verdict.sentence}")
    for check in verdict.checks:
        say(f"  {check.outcome:<12}  {check.name}: {check.observed}; bound: {check.bound}")
    rows = [
        (
            f"  {score.flights}",
            f"{score.predicted_per_s:.1f}",
            f"{score.measured_per_s:.1f}",
            "-" if score.measured_low is None else f"{score.measured_low:.1f}",
            "-" if score.measured_high is None else f"{score.measured_high:.1f}",
            f"{score.error:+.1%}",
        )
        for score in verdict.heights
    ]
    say(table(rows, ("  M", "predicted/s", "measured/s", "low 90 %", "high 90 %", "error")))
    if verdict.baseline_per_s is not None:
        say(f"without batching (C1): {verdict.baseline_per_s:.1f} request/s")
    if not verdict.preregistered:
        say("note: not pre-registered: these figures were measured before the prediction was made")
    if figure is not None:
        say(f"figure: {figure}")
    say(f"next: {_ADVICE[verdict.outcome].format(m=verdict.m_star, best=verdict.best_flights)}")


_ADVICE = {
    "held": "set M = {m} in your proxy",
    "refuted": "set M = {best}, where the measured peak is, and look for what the closed form leaves out",
    "inconclusive": "measure more sessions: b2g predict --sessions N, then b2g measure",
}
