"""Factorial studies: b2g study plan, run, status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import LARGEST_SEED, Json, Quiet, one_of
from b2gmodel.cli.output import progress_lines, say, say_json, table

if TYPE_CHECKING:
    from b2gmodel.live.study_run import Summary
    from b2gmodel.live.study_status import Status
    from b2gmodel.study_records import Study, StudyFailure

study_app = typer.Typer(
    name="study",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan, run and judge factorial studies of placements.",
)

StudyFile = Annotated[
    str,
    typer.Argument(
        help="A TOML file, or one that ships: published, quick or crossover.",
        autocompletion=one_of("published", "quick", "crossover"),
    ),
]
StudyFolder = Annotated[Path, typer.Argument(help="The study's folder.")]

_SHOWN_FAILURES: Final = 10


def register(app: typer.Typer) -> None:
    add_command(study_app, plan, example="b2g study plan quick --out study")
    add_command(study_app, run, example="b2g study run study", exits={3: "a run failed"})
    add_command(study_app, status, example="b2g study status study")
    app.add_typer(study_app)


def plan(
    file: StudyFile,
    out: Annotated[Path, typer.Option("--out", help="The study's folder.")] = Path("study"),
    server: Annotated[
        str | None, typer.Option("--server", help="In place of the file's: embedded, fake, or http://HOST:PORT.")
    ] = None,
    grpc_url: Annotated[str | None, typer.Option("--grpc-url", help="That server's gRPC endpoint, HOST:PORT.")] = None,
    seconds: Annotated[
        str | None, typer.Option("--seconds", metavar="TIME", help="In place of the file's length of a run.")
    ] = None,
    sessions: Annotated[int | None, typer.Option("--sessions", min=1, max=1000, help="In place of the file's.")] = None,
    repetitions: Annotated[
        int | None, typer.Option("--repetitions", min=1, max=1000, help="In place of the file's.")
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            "--clients", help="In place of the file's: inside, or process.", autocompletion=one_of("inside", "process")
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=LARGEST_SEED, help="In place of the file's.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the file, to copy and change, and stop.")] = False,
    json: Json = False,
) -> None:
    """Write a study's manifest: every run, in order."""
    from b2gmodel.live.study_server import reference_workloads
    from b2gmodel.live.study_store import StudyStore
    from b2gmodel.live.study_versions import version_of
    from b2gmodel.study_estimate import planned_s
    from b2gmodel.study_plan import plan_study
    from b2gmodel.units import parse_duration_s

    changes: dict[str, Any] = {
        "server": None if server is None else _server(server, grpc_url),
        "seconds_per_run": None if seconds is None else parse_duration_s(seconds, where="--seconds"),
        "sessions": sessions,
        "repetitions": repetitions,
        "clients": clients,
        "seed": seed,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    text, where = _read_plan(file)
    if show:
        say(text.rstrip())
        return
    study = plan_study(text, reference_workloads(), version_of, where=where, changes=changes)
    store = StudyStore.create(out, study)
    if json:
        say_json({"folder": str(out), "digest": store.digest, "runs": len(study.runs), "planned_s": planned_s(study)})
        return
    _say_plan(study, out, planned_s(study))


def run(folder: StudyFolder, quiet: Quiet = False, json: Json = False) -> int:
    """Do what is missing of a study.

    It can be stopped at any moment, and given again: what is complete is not done twice. Several of these may work on
    one study at a time.
    """
    from b2gmodel.live.study_run import run_study

    with progress_lines(quiet or json) as progress:
        summary = run_study(folder, progress)
    if json:
        say_json(
            {
                "planned": summary.planned,
                "complete": summary.complete,
                "done": summary.done,
                "failed": [_failure(each) for each in summary.failed],
                "elsewhere": summary.elsewhere,
            }
        )
    else:
        _say_summary(summary, folder)
    return 3 if summary.failed else 0


def status(folder: StudyFolder, json: Json = False) -> None:
    """Show what is done, failed or missing, and the time left."""
    from b2gmodel.live.study_status import status_of

    found = status_of(folder)
    if not json:
        _say_status(found, folder)
        return
    rows = [
        {
            "workload": row.workload,
            "transport": row.transport,
            "placement": row.placement,
            "planned": row.planned,
            "done": row.done,
            "failed": row.failed,
            "missing": row.missing,
        }
        for row in found.rows
    ]
    say_json(
        {
            "study": found.study.name,
            "planned": len(found.study.runs),
            "done": found.done,
            "rows": rows,
            "failures": [_failure(each) for each in found.failures],
            "remaining_s": found.remaining_s,
        }
    )


def _server(server: str, grpc_url: str | None) -> dict[str, str]:
    if server in ("embedded", "fake"):
        return {"kind": server}
    found = {"kind": "url", "url": server}
    return found if grpc_url is None else found | {"grpc_url": grpc_url}


def _read_plan(file: str) -> tuple[str, str]:
    """The text of a plan, and its name for errors."""
    import b2gmodel
    from b2gmodel.errors import UsageError

    shipped = {path.stem: path for path in (Path(b2gmodel.__file__).parent / "studies").glob("*.toml")}
    try:
        return shipped.get(file, Path(file)).read_text(encoding="utf-8"), file
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "cannot read the plan",
            observed=str(error),
            allowed=f"a TOML file, or one of {', '.join(sorted(shipped))}",
            where="FILE",
        ) from error


def _say_plan(study: Study, out: Path, planned_s: float) -> None:
    say(
        f"planned: {len(study.runs)} runs of study {study.name} in {len(study.blocks)} blocks, about {_long(planned_s)}"
    )
    shape = f"{study.sessions} session(s) of {study.repetitions} repetition(s), {study.seconds_per_run:g} s a run"
    say(f"  {shape}, clients {study.clients}, server {study.server.url or study.server.kind}, seed {study.seed}")
    rows = []
    for workload in study.workloads:
        cells = dict.fromkeys(run.cell for run in study.runs if run.workload == workload.name)
        transports = dict.fromkeys(run.transport for run in study.runs if run.workload == workload.name)
        size = "the server's" if workload.payload_bytes is None else f"{workload.payload_bytes / 1024:g}"
        placements = [each.placement for each in study.placements]
        runs = sum(run.workload == workload.name for run in study.runs)
        rows.append(
            (f"  {workload.name}", size, " ".join(transports), " ".join(placements), str(len(cells)), str(runs))
        )
    say(table(rows, ("  workload", "KiB/request", "transports", "placements", "cells", "runs")))
    for note in study.notes:
        say(f"note: {note}")
    say(f"written: {out / 'study.json'}")
    say(f"next: b2g study calibrate {out}, to predict it before it is run; or b2g study run {out}")


def _say_summary(summary: Summary, folder: Path) -> None:
    say(f"complete: {summary.complete} of {summary.planned} runs, {summary.done} of them by this call")
    _say_failures(summary.failed)
    if summary.elsewhere:
        say(f"  {len(summary.elsewhere)} block(s) were left to other processes that work on them")
    if summary.complete < summary.planned:
        say(f"next: b2g study run {folder}")
    else:
        say(f"next: b2g study status {folder}")


def _say_status(found: Status, folder: Path) -> None:
    planned = len(found.study.runs)
    left = "nothing is left" if found.done == planned else f"about {_long(found.remaining_s)} left"
    say(f"study {found.study.name}: {found.done} of {planned} runs are complete, {left}")
    rows = [
        (f"  {row.workload}", row.transport, row.placement, *map(str, (row.planned, row.done, row.failed, row.missing)))
        for row in found.rows
    ]
    say(table(rows, ("  workload", "transport", "placement", "planned", "done", "failed", "missing")))
    _say_failures(found.failures)
    if found.done < planned:
        say(f"next: b2g study run {folder}")


def _say_failures(failures: tuple[StudyFailure, ...] | list[StudyFailure]) -> None:
    for each in failures[:_SHOWN_FAILURES]:
        say(f"  failed: {each.run_id}: {each.error}")
    if len(failures) > _SHOWN_FAILURES:
        say(f"  and {len(failures) - _SHOWN_FAILURES} more: see failed/ in the study's folder")


def _failure(failure: StudyFailure) -> dict[str, str]:
    return {"run": failure.run_id, "session": failure.session_id, "kind": failure.kind, "error": failure.error}


def _long(seconds: float) -> str:
    """A time as a person plans with it."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
