"""The command that predicts: calibrations in, frozen predictions out; or a what-if, which is not frozen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import LARGEST_SEED, Json, PredictionsFolder, Quiet, parse_counts
from b2gmodel.cli.output import progress_lines, say, say_json, table
from b2gmodel.errors import UsageError

if TYPE_CHECKING:
    from b2gmodel.predictors import Simulator
    from b2gmodel.records import Calibration, CurvePoint, Prediction, PredictorResult


def register(app: typer.Typer) -> None:
    add_command(app, predict, example="b2g predict calibration/published/yolov8n.json")


def predict(
    calibrations: Annotated[
        list[Path],
        typer.Argument(metavar="CALIBRATION...", help="Calibrations, calibration/NAME.json.", show_default=False),
    ],
    k: Annotated[
        int | None, typer.Option("-k", help="Batch size to predict for. Default: the largest calibrated.")
    ] = None,
    flights: Annotated[str, typer.Option("--flights", help="Flights M that the measurement will run.")] = "1,2,3,4,6,8",
    up_to: Annotated[int, typer.Option("--up-to", min=1, max=256, help="The curves run over M = 1 to this.")] = 16,
    sessions: Annotated[int, typer.Option("--sessions", min=1, max=1000, help="Sessions of the measurement.")] = 4,
    seconds: Annotated[
        str, typer.Option("--seconds", metavar="TIME", help="Length of each run of the measurement.")
    ] = "2s",
    draws: Annotated[
        int, typer.Option("--draws", min=20, max=100_000, help="Draws of the calibration's uncertainty.")
    ] = 2000,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of the draws and of the order of runs.")
    ] = 1,
    simulate: Annotated[
        bool, typer.Option("--simulate/--analytic", help="With the simulation predictor, or the analytic ones alone.")
    ] = True,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if", help="Another system: payload=0.5x,k=16,instances=2,service=0.5x,link=10x,transport=shm."
        ),
    ] = None,
    transport_from: Annotated[
        list[Path] | None,
        typer.Option("--transport-from", help="A calibration over the other transport, for --what-if transport=."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the prediction.")] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign", help="An SSH key: sign what is frozen with it, in a file beside it.", show_default=False
        ),
    ] = None,
    predictions: PredictionsFolder = Path("predictions"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Predict M*, X(M) and what binds, and freeze it in the ledger."""
    from b2gmodel.ledger import Ledger
    from b2gmodel.live.host import describe_software
    from b2gmodel.prediction import predict as make_prediction
    from b2gmodel.records import Calibration, Plan
    from b2gmodel.store import check_name, read_record
    from b2gmodel.units import parse_duration_s
    from b2gmodel.what_if import parse_changes

    if name is not None:
        check_name(name, where="--name")
        if len(calibrations) > 1:
            raise UsageError("one name for several predictions", observed=name, where="--name", hint="leave it out")
    if sign is not None:
        _check_signing(sign, what_if)
    plan = Plan(
        flights=parse_counts(flights, where="--flights"),
        sessions=sessions,
        seconds_per_run=parse_duration_s(seconds, where="--seconds"),
        baseline_concurrency=8,
        order_seed=seed,
    )
    others = [read_record(path, Calibration) for path in transport_from or ()]
    changes = () if what_if is None else parse_changes(what_if, others)
    software, made = describe_software(), []
    sources = [read_record(path, Calibration) for path in calibrations]
    with progress_lines(quiet or not simulate) as show:
        for number, (path, source) in enumerate(zip(calibrations, sources, strict=True)):
            show(f"predict {source.name}", number / len(sources))
            simulator = simulator_of(path, source, k) if simulate else None
            made.append(
                make_prediction(
                    source,
                    k=k,
                    plan=plan,
                    software=software,
                    name=name,
                    flights=range(1, up_to + 1),
                    seed=seed,
                    draws=draws,
                    simulator=simulator,
                    what_if=changes,
                )
            )
    ledger = Ledger(predictions)
    files = [None if changes else ledger.freeze(prediction) for prediction in made]
    signatures = [None if sign is None or file is None else ledger.sign(file, sign) for file in files]
    if json:
        answers = [_answer(*each) for each in zip(made, files, signatures, strict=True)]
        say_json(answers[0] if len(answers) == 1 else {"predictions": answers})
        return
    for each in zip(made, files, signatures, strict=True):
        _tell(*each)


def _check_signing(key: Path, what_if: str | None) -> None:
    """What would keep the prediction from being signed, said before it is made."""
    from b2gmodel import signing

    if what_if is not None:
        raise UsageError("a what-if is not frozen, so there is nothing to sign", where="--sign", hint="leave it out")
    signing.check_readable(key, "--sign")
    signing.check_program()


def simulator_of(path: Path, source: Calibration, k: int | None) -> Simulator | None:
    """The simulation with the calibration's own cycles; None where its stations are not those of this model.

    That is where the server merges batches, or S and D are not stated in seconds.
    """
    from b2gmodel.laws import choose_point
    from b2gmodel.sim.simulation import Simulation
    from b2gmodel.store import read_cycles_s

    point = choose_point(source, k)
    if source.model.dynamic_batching or point.k is None or point.service_s is None:
        return None
    return Simulation(read_cycles_s(path, source, point.k), workers=os.cpu_count() or 1)


def _answer(prediction: Prediction, file: Path | None, signature: Path | None) -> dict[str, Any]:
    from b2gmodel.records import digest_of

    return {
        "digest": digest_of(prediction),
        "file": None if file is None else str(file),
        "signature": None if signature is None else str(signature),
        "prediction": prediction.model_dump(mode="json"),
    }


def _tell(prediction: Prediction, file: Path | None, signature: Path | None) -> None:
    """The answer, what binds, a row a predictor, a row an M, and what to know and to do."""
    closed, best = prediction.predictors[0], prediction.best
    # M* is the closed form's; an estimate that knows the height may be as good with fewer, or need more.
    kept = best.m_recommended if best.kind == "estimate" else closed.m_star
    at = best.at(kept)
    assert at is not None
    upper = "at most " if best.kind == "upper bound" else ""
    near = "" if kept == closed.m_star else ", which is within 2 % of the peak"
    say(
        f"M* = {closed.m_star}: keep {kept} batches in flight{near}, and expect {upper}{_interval(at)} request/s "
        f"({best.name})"
    )
    if closed.m_star_probabilities is not None:
        shares = ", ".join(f"M* = {m}: {share:.0%}" for m, share in closed.m_star_probabilities.items())
        say(f"  over the calibration's own uncertainty: {shares}")
    say(f"  {prediction.binding.sentence}")
    rows = [
        (
            f"  {result.name}",
            result.kind,
            str(result.m_star),
            str(result.m_95),
            str(result.m_recommended),
            f"{result.peak_per_s:.1f}",
        )
        for result in prediction.predictors
    ]
    say(table(rows, ("  predictor", "kind", "M*", "95 % at M", "loss < 2 % at M", "peak/s")))
    shown = [result for result in prediction.predictors if result.kind != "rival"]
    curves = [
        (f"  {point.flights}", *(_interval(result.at(point.flights)) for result in shown), _cycle(best, point.flights))
        for point in closed.curve
    ]
    say(table(curves, ("  M", *(f"{result.name}/s" for result in shown), "mean cycle")))
    for diagnostic in prediction.diagnostics:
        say(f"diagnostic {diagnostic.name}: {diagnostic.sentence}")
    for note in prediction.notes:
        say(f"note: {note}")
    if file is None:
        say("not frozen: a what-if cannot be measured on this system")
        say("next: build that system, calibrate it, and predict anew")
        return
    say(f"frozen: {file}")
    if signature is not None:
        say(f"signed: {signature}")
    measurable = prediction.server is not None
    say(f"next: b2g measure {file}" if measurable else f"next: b2g validate {file} MEASUREMENT")


def _interval(point: CurvePoint | None) -> str:
    if point is None:
        return "-"
    if point.low is None or point.high is None:
        return f"{point.throughput_per_s:.1f}"
    return f"{point.throughput_per_s:.1f} [{point.low:.1f}, {point.high:.1f}]"


def _cycle(result: PredictorResult, flights: int) -> str:
    from b2gmodel.units import format_duration

    point = result.at(flights)
    return "-" if point is None or point.cycle_s is None else format_duration(point.cycle_s)
