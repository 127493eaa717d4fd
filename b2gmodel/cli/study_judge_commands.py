"""The part of a study that predicts: b2g study calibrate, predict, judge, and all of it in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import LARGEST_SEED, Json, Quiet
from b2gmodel.cli.output import EXIT_CODES, progress_lines, say, say_json, table
from b2gmodel.cli.study_commands import StudyFile, StudyFolder, plan, study_app

if TYPE_CHECKING:
    from b2gmodel.placement_records import MeasuredCell, PlacementCell, StudyPrediction, StudyVerdict
    from b2gmodel.records import Estimate

BUDGET = "8s"
Seed = Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of the draws of the uncertainty.")]


def register() -> None:
    add_command(
        study_app,
        calibrate,
        example="b2g study calibrate study",
        exits={3: "no valid evidence, or the machine is too busy"},
    )
    add_command(study_app, predict, example="b2g study predict study")
    add_command(
        study_app,
        judge,
        example="b2g study judge study --figure crossover.svg",
        exits={0: "held", 1: "refuted", 3: "inconclusive or invalid"},
    )
    add_command(
        study_app,
        whole,
        example="b2g study all crossover --out study",
        exits={0: "held", 1: "refuted", 3: "inconclusive or invalid"},
        name="all",
    )


def calibrate(
    folder: StudyFolder,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="Longest time for each batch size.")] = BUDGET,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Calibrate each workload, before the first run."""
    from b2gmodel.live.study_flow import calibrate_study
    from b2gmodel.units import parse_duration_s

    with progress_lines(quiet or json) as progress:
        paths = calibrate_study(folder, progress, budget_s=parse_duration_s(budget, where="--budget"))
    if json:
        say_json({"calibrations": [str(path) for path in paths]})
        return
    say(f"calibrated: {len(paths)} workloads")
    for path in paths:
        say(f"  {path}")
    say(f"next: b2g study predict {folder}")


def predict(folder: StudyFolder, seed: Seed = 1, json: Json = False) -> None:
    """Predict placements, R and the crossover, and freeze it."""
    from b2gmodel.live.study_flow import freeze_study
    from b2gmodel.records import digest_of

    prediction, file = freeze_study(folder, seed=seed)
    if json:
        say_json({"file": str(file), "digest": digest_of(prediction), "prediction": prediction.model_dump(mode="json")})
        return
    _say_prediction(prediction)
    say(f"frozen: {file}")
    say(f"next: b2g study run {folder}")


def judge(
    folder: StudyFolder,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Where to draw R against payload, a .png, .svg or .pdf file.")
    ] = None,
    json: Json = False,
) -> int:
    """Judge the frozen prediction by the study's runs."""
    from b2gmodel.live.study_flow import judge_runs

    prediction, verdict, file = judge_runs(folder)
    if figure is not None:
        _draw(folder, prediction, verdict, figure)
    if json:
        say_json({"verdict": verdict.model_dump(mode="json"), "file": file.name})
        return EXIT_CODES[verdict.outcome]
    say_study_verdict(verdict)
    if figure is not None:
        say(f"figure: {figure}")
    return EXIT_CODES[verdict.outcome]


def whole(
    file: StudyFile,
    out: Annotated[Path, typer.Option("--out", help="The study's folder.")] = Path("study"),
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Where to draw R against payload, a .png, .svg or .pdf file.")
    ] = None,
    seed: Seed = 1,
    quiet: Quiet = False,
) -> int:
    """Plan, calibrate, predict, run and judge a study.

    Given again, it goes on where it stopped.
    """
    from b2gmodel.cli.study_commands import run
    from b2gmodel.live.study_commitment import frozen_prediction

    plan(file, out)
    if frozen_prediction(out) is None:
        calibrate(out, BUDGET, quiet)
        predict(out, seed)
    failed = run(out, quiet)
    return failed or judge(out, figure)


def say_study_verdict(verdict: StudyVerdict) -> None:
    """The answer, a line a check, a row a cell."""
    say(f"{verdict.outcome}: {verdict.sentence}")
    for check in verdict.checks:
        say(f"  {check.outcome:<12}  {check.name}: {check.observed}; bound: {check.bound}")
    for proof in verdict.evidence:
        say(f"  {proof.outcome:<12}  {proof.name}: {proof.observed}; bound: {proof.bound}")
    header = ("  workload", "KiB", "c", "X_C1/s", "X_C2/s", "X_C3/s", "X_C3/X_C1 - 1", "R", "R predicted", "P99 spread")
    say(table([_row(cell) for cell in verdict.cells], header))
    for cell in verdict.cells:
        if cell.undefined is not None:
            say(f"note: R of {cell.workload} at {cell.concurrency} clients is undefined: {cell.undefined}")
    say("note: measured (predicted); P99 spread is that of C1 over that of C3, exploratory")
    say("next: docs/study.md says how to read this")


def _say_prediction(prediction: StudyPrediction) -> None:
    for each in prediction.crossovers:
        where = each.payload_bytes
        told = f"none within the ladder: it lies {each.beyond} it" if where is None else f"{_kib(where)} KiB"
        at = f"k = {each.k} at {each.concurrency} clients over {each.transport}"
        say(f"crossover payload, {at}: {told}; {each.rootless_share or 0:.0%} of the draws have none")
    rows = [
        (
            f"  {cell.workload}",
            f"{cell.payload_bytes / 1024:.0f}",
            cell.transport,
            str(cell.k),
            str(cell.concurrency),
            f"{cell.c1_per_s.mean:.1f}",
            f"{cell.c2_per_s.mean:.1f}",
            f"{cell.c3_per_s.mean:.1f}",
            _interval(cell.gain, "+.0%"),
            _ratio(cell),
        )
        for cell in prediction.cells
    ]
    header = ("  workload", "KiB", "transport", "k", "c", "X_C1/s", "X_C2/s", "X_C3/s", "X_C3/X_C1 - 1", "R")
    say(table(rows, header))
    for note in prediction.notes:
        say(f"note: {note}")


def _row(cell: MeasuredCell) -> tuple[str, ...]:
    promised = cell.predicted

    def both(seen: Estimate | None, of: Estimate | None) -> str:
        told = "-" if seen is None else f"{seen.mean:.1f}"
        return told if of is None else f"{told} ({of.mean:.1f})"

    return (
        f"  {cell.workload}",
        f"{cell.payload_bytes / 1024:.0f}",
        str(cell.concurrency),
        both(cell.c1_per_s, None if promised is None else promised.c1_per_s),
        both(cell.c2_per_s, None if promised is None else promised.c2_per_s),
        both(cell.c3_per_s, None if promised is None else promised.c3_per_s),
        _interval(cell.gain, "+.0%") + ("" if promised is None else f" ({promised.gain.mean:+.0%})"),
        _ratio(cell),
        "-" if promised is None else _ratio(promised),
        "-" if cell.p99_spread_ratio is None else _interval(cell.p99_spread_ratio, ".1f"),
    )


def _ratio(cell: MeasuredCell | PlacementCell) -> str:
    return "undefined" if cell.ratio is None else _interval(cell.ratio, ".2f")


def _interval(found: Estimate, form: str) -> str:
    text = format(found.mean, form)
    return text if found.low is None or found.high is None else f"{text} [{found.low:{form}}, {found.high:{form}}]"


def _kib(where: Estimate) -> str:
    low, high = ("outside" if limit is None else f"{limit / 1024:.0f}" for limit in (where.low, where.high))
    return f"{where.mean / 1024:.0f} [{low}, {high}]"


def _draw(folder: Path, prediction: StudyPrediction, verdict: StudyVerdict, figure: Path) -> None:
    from b2gmodel.live.study_flow import CALIBRATIONS
    from b2gmodel.records import Calibration
    from b2gmodel.report.placements import draw_placements
    from b2gmodel.store import read_record

    calibrations = {
        cell.workload: read_record(folder / CALIBRATIONS / f"{cell.workload}-{cell.transport}.json", Calibration)
        for cell in prediction.cells
    }
    draw_placements(verdict, calibrations, figure)
