"""Commands that talk to a server: calibrate, measure, demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import (
    CalibrationFolder,
    Compute,
    GrpcUrl,
    Json,
    PredictionsFolder,
    Quiet,
    Url,
    one_of,
    parse_counts,
    parse_shapes,
    workload_names,
)
from b2gmodel.cli.output import EXIT_CODES, progress_lines, say, say_json

if TYPE_CHECKING:
    from b2gmodel.live.target import Target
    from b2gmodel.records import Calibration, ModelInfo


def register(app: typer.Typer) -> None:
    add_command(
        app,
        calibrate,
        example="b2g calibrate --url http://localhost:8000 --model resnet50 -k 8",
        exits={3: "no valid evidence, or the machine is too busy"},
    )
    add_command(
        app,
        measure,
        example="b2g measure predictions/NAME-DIGEST.json",
        exits={3: "not frozen, changed, or no valid evidence"},
    )
    add_command(app, demo, example="b2g demo", exits={0: "held", 1: "refuted", 3: "inconclusive or invalid"})


def calibrate(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Model on the server; repeat for several. Embedded: resnet50.",
            autocompletion=workload_names,
        ),
    ] = None,
    k: Annotated[str, typer.Option("-k", help="Batch sizes, separated by commas: 1,2,4,8.")] = "8",
    url: Url = None,
    grpc_url: GrpcUrl = None,
    transport: Annotated[
        str,
        typer.Option(
            "--transport",
            help="How batches travel to the server: http, grpc or shm.",
            autocompletion=one_of("http", "grpc", "shm"),
        ),
    ] = "http",
    null_model: Annotated[
        str | None,
        typer.Option(
            "--null-model",
            help="Model that computes nothing, for the transport law; 'none' for no law. Embedded: MODEL_null.",
        ),
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace-file", help="The server's trace file, where it runs on this host: splits more legs."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="NAME:3,224,224 for an input of dynamic shape, without the batch dimension."),
    ] = None,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="Longest time for each batch size.")] = "30s",
    precision: Annotated[
        float,
        typer.Option("--precision", help="Wanted half-width of the 95 % intervals of S and D, share of the cycle."),
    ] = 0.02,
    starts: Annotated[
        int,
        typer.Option(
            "--starts",
            min=1,
            max=1000,
            help="Repeat it on so many starts of the server (with --url of the load alone), and merge them: intervals "
            "then hold what differs between them.",
        ),
    ] = 1,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the calibration. Default: model and time.")
    ] = None,
    out: CalibrationFolder = Path("calibration"),
    compute: Compute = "emulated",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure S and D in single-flight, and write a calibration."""
    import math

    from b2gmodel.errors import UsageError
    from b2gmodel.live.calibrate import Wanted
    from b2gmodel.live.sessions import calibrate_models
    from b2gmodel.live.transports import TransportName
    from b2gmodel.store import check_name
    from b2gmodel.units import parse_duration_s

    if not (math.isfinite(precision) and 0 < precision < 1):
        raise UsageError("not a precision", observed=precision, allowed="above 0 and below 1", where="--precision")
    if model is None and url is not None:
        raise UsageError("a model is needed with --url", where="--model", hint="name a model that the server serves")
    if transport not in set(TransportName):
        raise UsageError("no such transport", observed=transport, allowed=", ".join(TransportName), where="--transport")
    models = model or ["resnet50"]
    if name is not None:
        check_name(name, where="--name")
    wanted = [
        Wanted(
            each,
            parse_counts(k, where="-k"),
            parse_shapes(shape or []),
            parse_duration_s(budget, where="--budget"),
            precision,
            transport,
            _null_of(each, null_model, embedded=url is None),
        )
        for each in models
    ]
    with progress_lines(quiet) as progress:
        target = _target(url, compute, grpc_url, trace_file)
        written = calibrate_models(target, wanted, folder=out, name=name, progress=progress, tested=True, starts=starts)
    if json:
        say_json(
            {
                "calibrations": [
                    {"file": str(path), "calibration": calibration.model_dump(mode="json")}
                    for path, calibration in written
                ]
            }
        )
        return
    for path, calibration in written:
        _say_calibration(calibration, path)


def _say_calibration(calibration: Calibration, path: Path) -> None:
    from b2gmodel.cli.output import table

    say(f"calibrated {calibration.model.name}{_how(calibration.model)} over {calibration.transport}")
    rows = []
    for point in calibration.points:
        cells = [f"  {point.k}", f"{point.payload_bytes / 1024:.0f}"]
        for estimate in (point.service_s, point.transport_s, point.cycle_s):
            assert estimate is not None
            assert estimate.low is not None
            cells.append(f"{estimate.mean * 1e3:.2f} ± {(estimate.mean - estimate.low) * 1e3:.2f}")
        assert point.transport_share is not None
        cells += [f"{point.transport_share.mean:.0%}", str(point.cycles), str(point.stopped_by)]
        rows.append(tuple(cells))
    header = ("  k", "KiB/request", "S ms", "D ms", "cycle ms", "share", "cycles", "stopped by")
    say(table(rows, header))
    for note in calibration.notes:
        say(f"note: {note}")
    if len(calibration.session_ids) == 1:
        embedded = calibration.server is not None and calibration.server.embedded
        more = "--starts 3 measures three" if embedded else "restart it yourself, and calibrate once each time"
        say(f"note: one start of the server: what differs between its starts is not in the intervals; {more}")
    say(f"written: {path}")
    say(f"next: b2g predict {path}")


def _how(model: ModelInfo) -> str:
    """What computed, where that is not a user's own model on a server of theirs."""
    if model.compute == "emulated":
        return " (emulated compute)"
    return "" if model.engine is None else f" (real compute: {model.engine.sentence})"


def measure(
    prediction: Annotated[str, typer.Argument(help="A frozen prediction: its file, or 8 digits of its digest.")],
    flights: Annotated[
        str | None,
        typer.Option("--flights", help="Other flights M than the frozen plan's; recorded as a deviation."),
    ] = None,
    url: Url = None,
    grpc_url: GrpcUrl = None,
    compute: Compute = "emulated",
    predictions: PredictionsFolder = Path("predictions"),
    name: Annotated[str | None, typer.Option("--name", help="Name of the measurement.")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run a frozen prediction's plan, and write the measurement."""
    from b2gmodel.ledger import Ledger
    from b2gmodel.live.sessions import measure_frozen
    from b2gmodel.measured import measured_curve
    from b2gmodel.store import check_name

    ledger = Ledger(predictions)
    frozen, digest = ledger.load_frozen(ledger.find(prediction))
    if name is not None:
        check_name(name, where="--name")
    address = frozen.server.address if frozen.server is not None else None
    target = _target(url or address, compute, grpc_url)
    chosen = parse_counts(flights, where="--flights") if flights is not None else None
    with progress_lines(quiet) as progress:
        path, measurement = measure_frozen(ledger, frozen, digest, target, flights=chosen, name=name, progress=progress)
    if json:
        say_json({"file": str(path), "measurement": measurement.model_dump(mode="json")})
        return
    best = max(measured_curve(measurement), key=lambda point: point.mean)
    say(f"measured: peak {best.mean:.1f} request/s at M = {best.flights}, over {len(measurement.sessions)} sessions")
    say(f"written: {path}")
    say(f"next: b2g validate {prediction}")


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything that the demo writes.")] = Path("b2g-demo"),
    compute: Compute = "emulated",
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Calibrate, predict, measure and judge on the embedded Triton."""
    from b2gmodel.cli.predict_command import simulator_of
    from b2gmodel.cli.verdict_text import say_verdict
    from b2gmodel.live.demo import run_demo
    from b2gmodel.live.engines import parse_compute
    from b2gmodel.live.target import EmbeddedTarget

    target = EmbeddedTarget.of(parse_compute(compute))
    with progress_lines(quiet) as progress:
        found = run_demo(out, progress, simulator_of, target)
    code = max(EXIT_CODES[case.verdict.outcome] for case in found.cases)
    if json:
        say_json(
            {
                "cases": [case.verdict.model_dump(mode="json") for case in found.cases],
                "figure": str(found.figure),
                "folder": str(out),
            }
        )
        return code
    say(found.sentence)
    for case in found.cases:
        say()
        model = case.prediction.model
        say(f"{model.name} ({model.compute} compute, {case.prediction.payload_bytes // 1024} KiB a request)")
        say_verdict(case.verdict, case.prediction, out / "predictions", None)
    say()
    say(f"figure: {found.figure}")
    say(f"records: {out}")
    return code


def _null_of(model: str, null_model: str | None, *, embedded: bool) -> str | None:
    """The null model to measure the transport against: the one named, or the embedded server's own."""
    if null_model == "none":
        return None
    if null_model is None and embedded:
        return f"{model.removesuffix('_dynamic').removesuffix('_null')}_null"
    return null_model


def _target(url: str | None, compute: str, grpc_url: str | None = None, trace_file: Path | None = None) -> Target:
    from dataclasses import replace

    from b2gmodel.live.engines import parse_compute
    from b2gmodel.live.target import EmbeddedTarget, parse_url

    if url is not None:
        return replace(parse_url(url, grpc_url=grpc_url), trace_file=trace_file)
    return EmbeddedTarget.of(parse_compute(compute))
