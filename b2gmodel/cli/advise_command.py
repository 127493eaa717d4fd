"""The command that advises: calibrations in, one recommendation out, with the settings to paste."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import LARGEST_SEED, Json
from b2gmodel.cli.output import say, say_json
from b2gmodel.errors import UsageError

if TYPE_CHECKING:
    from b2gmodel.advice import Advice
    from b2gmodel.advice_surface import LatencySimulator
    from b2gmodel.records import Calibration

_EXIT_CODES = {"met": 0, "none given": 0, "not met": 1, "unknown": 3}
_SIMULATED_DRAWS = 60


def register(app: typer.Typer) -> None:
    add_command(
        app,
        advise,
        example="b2g advise calibration/NAME.json --p99 100ms --rate 300",
        exits={
            0: "met, or no budget given",
            1: "the budget or the rate cannot be met",
            3: "not known without simulation",
        },
    )


def advise(
    calibrations: Annotated[
        list[Path],
        typer.Argument(metavar="CALIBRATION...", help="Of one model: one, or one a transport.", show_default=False),
    ],
    p99: Annotated[str | None, typer.Option("--p99", metavar="TIME", help="Budget of a request's latency.")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Offered requests a second. Default: callers fill all flights.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate/--analytic", help="With simulated latency, or only bounds on it.")
    ] = True,
    draws: Annotated[
        int,
        typer.Option(
            "--draws", min=20, max=100_000, help="Draws of the calibration's uncertainty; 24 of them with latency."
        ),
    ] = 400,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of draws and simulation.")] = 1,
    json: Json = False,
) -> int:
    """Recommend placement, k, M and transport, with settings."""
    from b2gmodel.advice import advise as make_advice
    from b2gmodel.advice_surface import Source
    from b2gmodel.records import Calibration
    from b2gmodel.store import read_record
    from b2gmodel.units import parse_duration_s

    budget_s = None if p99 is None else parse_duration_s(p99, where="--p99")
    if len({path.resolve() for path in calibrations}) < len(calibrations):
        raise UsageError("a calibration is named twice", where="CALIBRATION", hint="leave one out")
    read = [(path, read_record(path, Calibration)) for path in calibrations]
    sources = [Source(of, _simulators(path, of) if simulate else {}) for path, of in read]
    advice = make_advice(sources, p99_s=budget_s, rate_per_s=rate, seed=seed, draws=draws)
    if json:
        say_json(advice.model_dump(mode="json"))
    else:
        paths = {of.name: path for path, of in read}
        _tell(advice, paths[advice.calibration_name])
    return _EXIT_CODES[advice.outcome]


def _simulators(path: Path, of: Calibration) -> dict[int, LatencySimulator]:
    """A simulation for each batch size, with its own cycles; none where the server merges batches of its own."""
    from b2gmodel.sim.latency import SimulatedLatency
    from b2gmodel.store import read_cycles_s

    if of.model.dynamic_batching:
        return {}
    sizes = [point.k for point in of.points if point.k is not None and point.service_s is not None]
    return {k: SimulatedLatency(read_cycles_s(path, of, k), draws=_SIMULATED_DRAWS, cycles=5_000) for k in sizes}


def _tell(advice: Advice, path: Path) -> None:
    """The answer, why, what binds, what to paste, and what to do next."""
    from b2gmodel.units import format_duration

    say(advice.sentence)
    for reason in advice.reasons:
        say(f"  {reason}")
    say(f"  {advice.binding.sentence}")
    if advice.mean_s is not None:
        say(f"  mean latency {format_duration(advice.mean_s)}")
    for setting in advice.settings:
        say(f"{setting.where} (confidence {setting.confidence}): {setting.reason}")
        for line in setting.text.splitlines():
            say(f"    {line}")
    for note in advice.notes:
        say(f"note: {note}")
    if advice.placement == "C2":
        say("next: b2g study plans and measures placements side by side")
    elif advice.placement == "C1":
        say(f"next: b2g predict {path} -k 1, then b2g measure: hold it to its word")
    else:
        say(f"next: b2g predict {path} -k {advice.k}, then b2g measure: hold it to its word")
