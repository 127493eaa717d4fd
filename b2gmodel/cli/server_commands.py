"""Commands about servers and this machine: server, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import Compute, Json, Url, workload_names
from b2gmodel.cli.output import say, say_json


def register(app: typer.Typer) -> None:
    add_command(app, server, example="b2g server --model resnet50")
    add_command(
        app,
        doctor,
        example="b2g doctor",
        exits={0: "nothing is missing", 2: "wrong use, or something needed is missing"},
    )


def server(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="Workload to serve; repeat for several. Default: all.", autocompletion=workload_names
        ),
    ] = None,
    compute: Compute = "emulated",
    show_table: Annotated[
        bool, typer.Option("--show-table", help="Print the table of workloads, to copy and edit, and stop.")
    ] = False,
    export_null: Annotated[
        Path | None,
        typer.Option(
            "--export-null",
            help="Write a null twin of --model at --url into this model repository (Python backend), and stop.",
        ),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Run the embedded Triton with the reference workloads.

    It stops at SIGINT or SIGTERM.
    """
    import signal
    from dataclasses import asdict

    from b2gmodel.live.engines import Emulated, parse_compute
    from b2gmodel.live.server import EmbeddedServer
    from b2gmodel.live.target import EmbeddedTarget
    from b2gmodel.live.workloads import BUILT_IN_TABLE

    if export_null is not None:
        _export_null(export_null, url, model or [])
        return
    wanted = parse_compute(compute)
    if show_table:
        file = wanted.table if isinstance(wanted, Emulated) else None
        say((file or BUILT_IN_TABLE).read_text(encoding="utf-8").rstrip())
        return
    target = EmbeddedTarget.of(wanted)
    stop = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    # Blocked before the start, so that a signal meanwhile waits instead of breaking it off half-way.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    with EmbeddedServer.start(target.table, models=model, engine=target.engine) as running:
        addresses = {
            "http": "http://{}:{}".format(*running.http_address),
            "grpc": "{}:{}".format(*running.grpc_address),
            "metrics": "http://{}:{}/metrics".format(*running.metrics_address),
        }
        if json:
            say_json(
                {
                    **addresses,
                    "version": running.version,
                    "compute": running.compute,
                    "engine": None if running.engine is None else asdict(running.engine),
                    "models": running.models,
                }
            )
        else:
            how = "" if running.engine is None else f" ({running.engine.sentence})"
            say(f"ready: Triton {running.version}, {running.compute} compute{how}")
            for name, address in addresses.items():
                say(f"  {name:<8} {address}")
            say(f"  models   {', '.join(running.models)} (each also as NAME_dynamic and NAME_null)")
            say(f"next: b2g calibrate --url {addresses['http']} --model {running.models[0]}")
        while signal.sigtimedwait(stop, 1.0) is None:
            running.check()


def _export_null(folder: Path, url: str | None, models: list[str]) -> None:
    from b2gmodel.errors import UsageError
    from b2gmodel.live.null_twin import write_null_twins
    from b2gmodel.live.run_loop import run_loop
    from b2gmodel.live.target import parse_url

    if url is None or not models:
        raise UsageError(
            "a null twin needs the model that it stands for",
            where="--export-null",
            hint="name it: --url http://HOST:PORT --model MODEL",
        )
    for model, twin in zip(models, run_loop(write_null_twins(parse_url(url), models, folder)), strict=True):
        say(f"written: {twin}")
        say(f"next: let the server load it, then b2g calibrate --url {url} --model {model} --null-model {twin.name}")


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not start the server.")] = False,
    json: Json = False,
) -> int:
    """Say what this machine can and cannot do."""
    from b2gmodel.live.doctor import run_checks

    checks = run_checks(start_server=not quick)
    missing = [check for check in checks if not check.ok]
    if json:
        say_json(
            {
                "ready": not missing,
                "checks": [
                    {"name": c.name, "state": c.state.name.lower(), "observed": c.observed, "todo": c.todo}
                    for c in checks
                ],
            }
        )
        return 2 if missing else 0
    say("ready for b2g demo" if not missing else f"missing: {', '.join(check.name for check in missing)}")
    for check in checks:
        todo = f" -> {check.todo}" if check.todo else ""
        say(f"  {check.state.value:<16}  {check.name:<16}  {check.observed}{todo}")
    return 2 if missing else 0
