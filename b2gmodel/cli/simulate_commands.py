"""The command that simulates: one point, or a sweep to a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import Json, Quiet, one_of
from b2gmodel.cli.output import progress_lines, say, say_json, table
from b2gmodel.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from b2gmodel.sim.question import Question
    from b2gmodel.sim.sweep import Row


def register(app: typer.Typer) -> None:
    add_command(
        app,
        simulate,
        example="b2g simulate --service 27.6ms --transport 61.3ms -k 8 --sweep flights=1,2,3,4,6 --out x.csv",
    )


def simulate(
    calibration: Annotated[
        Path | None, typer.Argument(help="A calibration that S, D and their spread come from.", show_default=False)
    ] = None,
    service: Annotated[str | None, typer.Option("--service", metavar="TIME", help="S of a batch.")] = None,
    transport: Annotated[str | None, typer.Option("--transport", metavar="TIME", help="D of a batch.")] = None,
    service_cv: Annotated[float, typer.Option("--service-cv", help="Coefficient of variation of S.")] = 0.0,
    transport_cv: Annotated[float, typer.Option("--transport-cv", help="Coefficient of variation of D.")] = 0.0,
    transport_rates: Annotated[
        str | None,
        typer.Option("--transport-rates", help="Batches a second with 1,2,... in transport. Default: a pure delay."),
    ] = None,
    k: Annotated[int | None, typer.Option("-k", min=1, help="Batch size of the proxy.")] = None,
    flights: Annotated[
        int, typer.Option("--flights", min=1, help="Batches in flight, M; for several: --sweep flights=1,2,4.")
    ] = 1,
    instances: Annotated[int | None, typer.Option("--instances", min=1, help="Model instances, g.")] = None,
    clients: Annotated[
        int | None, typer.Option("--clients", min=1, help="Concurrent clients. Default: as many as fill M batches.")
    ] = None,
    think: Annotated[
        str | None, typer.Option("--think", metavar="TIME", help="Mean think time of a client, exponential.")
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Poisson requests a second instead of clients.")] = None,
    queue_limit: Annotated[int | None, typer.Option("--queue-limit", min=1, help="Requests that may wait.")] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="How long a request may wait.")
    ] = None,
    formation: Annotated[
        str | None,
        typer.Option("--formation-deadline", metavar="TIME", help="When a partial batch goes; 0ms: at once."),
    ] = None,
    server_max_batch: Annotated[
        int | None, typer.Option("--server-max-batch", min=1, help="Dynamic batching in the server, up to this many.")
    ] = None,
    server_delay: Annotated[str | None, typer.Option("--server-delay", metavar="TIME", help="Its queue delay.")] = None,
    service_per_row: Annotated[
        str | None, typer.Option("--service-per-row", metavar="TIME", help="Growth of S with each row beyond k.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", help="NAME=V1,V2,...; repeat for a grid. Times in seconds.")
    ] = None,
    precision: Annotated[float, typer.Option("--precision", help="Half-width of the mean response, a share.")] = 0.01,
    most_cycles: Annotated[
        int | None,
        typer.Option(
            "--most-cycles",
            min=1,
            help="Longest run of a point. Default: 134217728, or 1048576 with the reference engine.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed, the same for every point.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="Table of the points: .csv or .parquet.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Figure of a sweep: .png, .svg or .pdf.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Picture of the first flights on the stations over time.")
    ] = None,
    executor: Annotated[
        str,
        typer.Option("--executor", help="serial, joblib or dask.", autocompletion=one_of("serial", "joblib", "dask")),
    ] = "serial",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes for joblib.")] = 2,
    scheduler: Annotated[str | None, typer.Option("--scheduler", help="Dask scheduler, tcp://HOST:PORT.")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Run the queueing model: throughput, latency, rejections."""
    from dataclasses import replace
    from functools import partial

    from b2gmodel.sim.experiments import Precision
    from b2gmodel.sim.question import Point, Question, answer
    from b2gmodel.sim.sweep import Executor, grid
    from b2gmodel.sim.sweep import sweep as run_sweep
    from b2gmodel.units import parse_duration_s

    def seconds(text: str | None, where: str, default: Any = None) -> Any:
        return default if text is None else parse_duration_s(text, where=where, allow_zero=True)

    measured = _measured(calibration, k)
    if transport is not None:
        # A transport of the user's own: what was measured of the other one no longer applies.
        measured.pop("transport_rates_per_s", None)
    given = {
        "service_s": seconds(service, "--service", measured.get("service_s")),
        "transport_s": seconds(transport, "--transport", measured.get("transport_s")),
    }
    for name, value in given.items():
        if value is None:
            option = f"--{name.removesuffix('_s')}"
            raise UsageError("a simulation needs S and D", where=option, hint="give it, or name a calibration")
    question = Question(
        **{**measured, **given},
        **_unless_measured(measured, service_cv=service_cv, transport_cv=transport_cv),
        flights=flights,
        clients=clients,
        think_s=seconds(think, "--think", 0.0),
        rate_per_s=rate,
        queue_limit=queue_limit,
        patience_s=seconds(deadline, "--deadline"),
        formation_s=seconds(formation, "--formation-deadline"),
        server_max_batch=server_max_batch,
        server_delay_s=seconds(server_delay, "--server-delay", 0.0),
        service_per_row_s=seconds(service_per_row, "--service-per-row", 0.0),
    ).with_values({"k": k or measured.get("k") or 1, "instances": instances or measured.get("instances") or 1})
    if transport_rates is not None:
        question = replace(question, transport_rates_per_s=_numbers(transport_rates, "--transport-rates"))
    axes = dict(_axis(text) for text in sweep or [])
    _check_outputs(out, figure, axes)
    if executor not in list(Executor):
        raise UsageError("not an executor", observed=executor, allowed=", ".join(Executor), where="--executor")
    points = [
        Point(question.with_values(values), values, seed, Precision(precision, most_cycles=most_cycles))
        for values in grid(axes)
    ]
    ended = 0
    with progress_lines(quiet) as show:

        def point_ended(count: int, of: int) -> None:
            nonlocal ended
            ended = count
            if of > 1:
                show(f"{count} of {of} points", count / of)

        def within(stage: str, share: float) -> None:
            many = len(points) > 1
            show(f"{ended} of {len(points)} points" if many else stage, (ended + share) / len(points))

        answers, complete = run_sweep(
            # A point that runs elsewhere cannot call back.
            partial(answer, progress=within) if executor == Executor.SERIAL else answer,
            points,
            executor=Executor(executor),
            workers=workers,
            scheduler=scheduler,
            done=point_ended,
        )
    rows = [row for row in answers if row is not None]
    if not rows:
        raise KeyboardInterrupt
    files = _write(rows, axes, out, figure)
    if trace is not None:
        _draw_trace(question, seed, trace)
        files.append(trace)
    _tell(rows, list(axes), files, json=json)
    if not complete:
        raise KeyboardInterrupt
    if all(row["refused"] for row in rows):
        raise EvidenceError("no point has an answer", hint="the reasons stand with the points")
    return 0


def _measured(calibration: Path | None, k: int | None) -> Row:
    """What a calibration says: means, spread, g, k, and its cycles where their file lies beside it."""
    if calibration is None:
        return {}
    import numpy as np

    from b2gmodel.laws import choose_point, laws_of
    from b2gmodel.records import Calibration
    from b2gmodel.store import read_cycles_s, read_record

    record = read_record(calibration, Calibration)
    point = choose_point(record, k)
    laws = laws_of(record, point, 0, np.random.default_rng(0))
    if not laws.is_timed:
        raise EvidenceError("the calibration does not state S and D here", observed=k, where=str(calibration))
    found: Row = {
        "service_s": float(laws.service_s[0]),
        "transport_s": float(laws.transport_s[0]),
        "k": point.k,
        "instances": record.model.instances,
    }
    if laws.transport_rates_per_s is not None:
        found["transport_rates_per_s"] = tuple(laws.transport_rates_per_s[0].tolist())
    if point.compute_law is not None:
        found["busy_service_s"] = tuple(laws.busy_service_s[0].tolist())
    if record.raw is None:
        spread = {"service_cv": laws.service_cv, "transport_cv": laws.transport_cv}
        return found | {name: cv for name, cv in spread.items() if cv is not None}
    return found | {"cycles_s": read_cycles_s(calibration, record, point.k)}


def _unless_measured(measured: Row, **values: float) -> Row:
    return {name: value for name, value in values.items() if name not in measured}


def _numbers(text: str, where: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            "not a list of numbers", observed=text, allowed="numbers separated by commas", where=where
        ) from None


def _axis(text: str) -> tuple[str, tuple[float, ...]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise UsageError("not a sweep", observed=text, allowed="NAME=V1,V2,...", where="--sweep")
    return name.replace("-", "_"), _numbers(values, "--sweep")


def _check_outputs(out: Path | None, figure: Path | None, axes: dict[str, tuple[float, ...]]) -> None:
    """Said before the work, not after it."""
    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise UsageError("not a kind of table", observed=out.suffix, allowed=".csv, .parquet", where="--out")
    if figure is not None and not axes:
        raise UsageError("a figure needs a sweep", where="--figure", hint="add --sweep flights=1,2,3,4")


def _write(rows: list[Row], axes: dict[str, tuple[float, ...]], out: Path | None, figure: Path | None) -> list[Path]:
    from b2gmodel.store import write_atomically

    written = []
    if out is not None:
        import pandas as pd

        frame = pd.DataFrame(rows)
        numbers = frame.columns.difference(["engine", "refused"])
        frame[numbers] = frame[numbers].apply(pd.to_numeric)
        as_csv = out.suffix == ".csv"
        write_atomically(
            out,
            lambda stream: frame.to_csv(stream, index=False) if as_csv else frame.to_parquet(stream, index=False),
            replace=True,
        )
        written.append(out)
    if figure is not None:
        from b2gmodel.sim.pictures import draw_sweep

        draw_sweep(rows, list(axes), figure)
        written.append(figure)
    return written


def _draw_trace(question: Question, seed: int, path: Path) -> None:
    """Some ten rounds of all flights, by the reference engine."""
    import numpy as np

    from b2gmodel.sim.pictures import draw_trace
    from b2gmodel.sim.reference import simulate as simulate_reference

    count = 10 * question.flights
    outcome = simulate_reference(question.scenario(), np.random.SeedSequence(seed), flights=count, trace=True)
    draw_trace([stay for stay in outcome.stays if stay.flight_id < count], question.flights, path)


def _tell(rows: list[Row], axes: list[str], files: list[Path], *, json: bool) -> None:
    if json:
        say_json({"points": rows, "files": [str(path) for path in files]})
        return
    answered = [row for row in rows if not row["refused"]]
    if answered:
        best = max(answered, key=lambda row: float(row["throughput_per_s"]))
        at = ", ".join(f"{axis} = {best[axis]:g}" for axis in axes)
        say(f"X = {best['throughput_per_s']:.4g} request/s" + (f", the most of the sweep, at {at}" if at else ""))
    header = (
        *(axes or ["point"]),
        *("X, request/s", "95 %", "mean, ms", "P50", "P95", "P99"),
        *("GPU busy", "95 %", "at GPU", "95 %", "rejected", "95 %"),
    )
    say(table([_line(row, axes) for row in rows], header))
    for reason in dict.fromkeys(row["refused"] for row in rows if row["refused"]):
        say(f"refused: {reason}")
    for path in files:
        say(f"wrote {path}")


def _line(row: Row, axes: list[str]) -> tuple[str, ...]:
    place = tuple(f"{row[axis]:g}" for axis in axes) or ("-",)
    if row["refused"]:
        return (*place, "refused", *("-",) * 11)

    def with_interval(name: str, form: str) -> tuple[str, str]:
        low, mean, high = (row[name + side] for side in ("_low", "", "_high"))
        return ("-", "-") if mean is None else (format(mean, form), f"{low:{form}} to {high:{form}}")

    return (
        *place,
        *with_interval("throughput_per_s", ".4g"),
        *(f"{1e3 * row[name]:.4g}" for name in ("response_s", "p50_s", "p95_s", "p99_s")),
        *with_interval("gpu_utilisation", ".1%"),
        *with_interval("gpu_queue", ".4g"),
        *with_interval("rejected_share", ".2%"),
    )
