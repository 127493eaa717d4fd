"""A study of placements as it is shown: the verdict, where to batch, R against payload, the map of regimes, tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from b2gmodel.placement import PlacementLaws
from b2gmodel.placement_records import (
    Crossover,
    MeasuredCell,
    PlacementCell,
    StudyMeasurement,
    StudyPrediction,
    StudyVerdict,
)
from b2gmodel.records import Calibration, CalibrationPoint, Estimate
from b2gmodel.report import report_figures as figures
from b2gmodel.report.placements import SPEEDS, draw_crossovers, draw_gain, draw_map, draw_ratio, regime_map, shown_cells
from b2gmodel.report.report_cases import Case, record_of
from b2gmodel.report.report_parts import (
    EMPTY,
    CaseView,
    Cell,
    Part,
    Picture,
    Section,
    Sentence,
    Table,
    estimate,
    number,
    payload,
    plain,
    words,
)
from b2gmodel.report.report_provenance import provenance
from b2gmodel.report.report_scores import checks_table, evidence_table
from b2gmodel.report.report_sections import EMULATED, NOT_JUDGED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KIB: Final = 1024
_NONE: Final = Cell(EMPTY)


def study_view(case: Case, prediction: StudyPrediction) -> CaseView:
    """All that is known of a study's prediction."""
    measurement, verdict = record_of(case.measurement, StudyMeasurement), record_of(case.verdict, StudyVerdict)
    named = {cell.workload: cell.calibration_digest for cell in prediction.cells}
    calibrations = {
        workload: case.calibrations[digest].record for workload, digest in named.items() if digest in case.calibrations
    }
    computes = {each.model.compute for each in calibrations.values()} | (
        {measurement.compute} if measurement else set()
    )
    tag = EMULATED if "emulated" in computes else ""
    place = f"case-{case.prediction.digest[:8]}" + (f"-{case.measurement.digest[:8]}" if case.measurement else "")
    setting, told = _where_to_batch(prediction, verdict)
    sections = [Section("Where to batch", told, tag)]
    if verdict is not None:
        sections.append(Section("R against payload", _against_payload(verdict, place, tag), tag))
        sections.append(Section("Regime map", _maps(verdict, calibrations, place, tag), tag))
    sections.append(Section("Where the time goes", _legs(prediction, calibrations, place, tag), tag))
    if verdict is None:
        sections.append(Section("Cells", (_predicted_table(prediction.cells),), tag))
    else:
        sections += [
            Section("Claims", (checks_table(verdict.checks),), tag),
            Section("Cells", (_cells_table(verdict.cells), *_undefined(verdict.cells)), tag),
            Section("Evidence", (evidence_table(verdict.evidence),)),
        ]
    notes = [("prediction", note) for note in prediction.notes]
    notes += [("measurement", note) for note in measurement.notes] if measurement else []
    if notes:
        sections.append(Section("Notes", tuple(Sentence(plain(f"{of}: {note}")) for of, note in notes), tag))
    sections.append(provenance(case))
    payloads = len({cell.payload_bytes for cell in prediction.cells})
    return CaseView(
        place=place,
        title=plain(f"study {prediction.name}{f' ({tag})' if tag else ''}, {payloads} payloads"),
        outcome=verdict.outcome if verdict else NOT_JUDGED,
        sentence=plain(verdict.sentence if verdict else _promise(prediction)),
        tags=(tag,) if tag else (),
        setting=setting,
        missing=case.missing,
        sections=tuple(sections),
    )


def _promise(of: StudyPrediction) -> str:
    wins = sum(cell.gain.mean > 0 for cell in of.cells)
    return f"Predicted and not judged: batching in the proxy gains in {wins} of {len(of.cells)} cells."


def _where_to_batch(prediction: StudyPrediction, verdict: StudyVerdict | None) -> tuple[str, tuple[Part, ...]]:
    """A sentence a setting: up to which payload the proxy's batching gains. Invalid evidence recommends nothing."""
    if verdict is not None and verdict.outcome == "invalid":
        text = "Choose nothing on this evidence: mend what failed, and run the study again."
        return "nothing yet", (Sentence(text, tone="undecided"),)
    found = prediction.crossovers if verdict is None else tuple(each.measured for each in verdict.crossovers)
    source = "predicted" if verdict is None else "measured"
    if verdict is not None and verdict.outcome == "inconclusive":
        source += ", not decided"
    told = [f"With {each.concurrency} clients over {each.transport} and k = {each.k}: {_advice(each, source)}."
            for each in found]  # fmt: skip
    if not told:
        told = ["No crossover payload was asked for: the cells below say where the proxy gains."]
    setting = _advice(found[0], source) if found else "see the cells"
    return setting, tuple(Sentence(plain(text)) for text in told)


def _advice(of: Crossover, source: str) -> str:
    if of.payload_bytes is not None:
        return f"batch in the proxy below {_crossover(of)} ({source}), and above it not in a single-flight proxy"
    if of.beyond == "above":
        return f"batch in the proxy: it gains at every payload up to {payload(of.greatest_payload_bytes)} ({source})"
    if of.beyond == "below":
        return f"do not batch in a single-flight proxy: it loses from {payload(of.least_payload_bytes)} on ({source})"
    return f"no sign change is known ({source})"


def _crossover(of: Crossover) -> str:
    """``3237 KiB [2915, 3724]``; a limit outside the ladder is said to be so."""
    where = of.payload_bytes
    if where is None:
        return f"{of.beyond or 'not within'} the ladder"
    low, high = ("outside" if limit is None else f"{limit / _KIB:.0f}" for limit in (where.low, where.high))
    return f"{where.mean / _KIB:.0f} KiB [{low}, {high}]"


def _setting(cells: Sequence[MeasuredCell], tag: str) -> str:
    first = cells[0]
    told = f"k = {first.k} in the proxy, {first.concurrency} clients, {first.transport}"
    return f"{told} ({tag})" if tag else told


def _against_payload(verdict: StudyVerdict, place: str, tag: str) -> tuple[Part, ...]:
    """Gain and R with the crossover band, and each crossover in numbers."""
    cells = shown_cells(verdict)
    crossovers = _crossovers_table(verdict)
    if len(cells) < 2:
        return (Sentence("A figure against payload needs two payloads."), crossovers)
    setting = _setting(cells, tag)
    data = Table(
        "Gain and R against payload: measured, then predicted",
        ("payload, KiB", "X_C3 / X_C1 - 1", "predicted gain", "R", "predicted R"),
        tuple(
            (
                Cell(f"{cell.payload_bytes / _KIB:.0f}", cell.payload_bytes),
                estimate(cell.gain, "+.1%"),
                estimate(_promised(cell, "gain"), "+.1%"),
                _ratio(cell),
                _NONE if cell.predicted is None else _ratio(cell.predicted),
            )
            for cell in cells
        ),
    )
    gains = "; ".join(f"{payload(cell.payload_bytes)}: {estimate(cell.gain, '+.1%').text}" for cell in cells)
    ratios = "; ".join(f"{payload(cell.payload_bytes)}: {_ratio(cell).text}" for cell in cells)
    bands = "; ".join(f"Crossover measured {_crossover(each.measured)}, predicted {_crossover(each.predicted)}"
                      for each in verdict.crossovers)  # fmt: skip
    return (
        Picture(
            name=f"{place}-ratio",
            title=plain(f"R against payload: {setting}"),
            description=plain(f"Measured R = (X_C3 - X_C1) / (X_C2 - X_C1): {ratios}. {bands}."),
            data=data,
            draw=_panel(lambda panel: _draw_ratio(panel, verdict, cells)),
            size_in=(4.4, 3.6),
        ),
        Picture(
            name=f"{place}-gain",
            title=plain(f"Gain of the proxy against payload: {setting}"),
            description=plain(f"Measured X_C3 / X_C1 - 1: {gains}. {bands}."),
            data=data,
            draw=_panel(lambda panel: draw_gain(panel, verdict, cells)),
            size_in=(4.4, 3.6),
        ),
        crossovers,
    )


def _maps(verdict: StudyVerdict, calibrations: dict[str, Calibration], place: str, tag: str) -> tuple[Part, ...]:
    """Where to batch on servers and links of other speeds, by the laws of each calibrated payload."""
    cells = shown_cells(verdict)
    lacking = sorted({cell.workload for cell in cells} - set(calibrations))
    if lacking or len(cells) < 2:
        why = f"the calibrations of {', '.join(lacking)} are not here" if lacking else "it needs two payloads"
        return (Sentence(plain(f"There is no map: {why}."), tone="undecided"),)
    setting = _setting(cells, tag)
    own = [calibrations[cell.workload] for cell in cells]
    columns = ("speed", *(payload(cell.payload_bytes) for cell in cells))
    parts: list[Part] = []
    for what, faster in (("compute", PlacementLaws.faster_compute), ("link", PlacementLaws.faster_link)):
        gains = regime_map(own, cells[0].k, cells[0].concurrency, faster, SPEEDS)
        rows = tuple(
            (Cell(f"{speed:.3g}x", speed), *(number(float(gain), "+.0%") for gain in row))
            for speed, row in zip(SPEEDS, gains, strict=True)
        )
        signs = "; ".join(
            f"{speed:.3g} times: {', '.join(f'{gain:+.0%}' for gain in row)}"
            for speed, row in list(zip(SPEEDS, gains, strict=True))[::2]
        )
        sizes = ", ".join(columns[1:])
        parts.append(
            Picture(
                name=f"{place}-map-{what}",
                title=plain(f"Regime map, speed of the {what}: {setting}"),
                description=plain(f"Predicted X_C3 / X_C1 - 1 at {sizes}, with the {what} so fast: {signs}."),
                data=Table(f"Predicted X_C3 / X_C1 - 1 by speed of the {what}", columns, rows),
                draw=_map_drawer(cells, calibrations, faster, what),
                size_in=(4.4, 3.8),
            )
        )
    return tuple(parts)


def _map_drawer(
    cells: Sequence[MeasuredCell],
    calibrations: dict[str, Calibration],
    faster: Callable[[PlacementLaws, float], PlacementLaws],
    what: str,
) -> Callable[[Figure], None]:
    return _panel(lambda panel: draw_map(panel, cells, calibrations, faster, what))


def _draw_ratio(panel: Axes, verdict: StudyVerdict, cells: Sequence[MeasuredCell]) -> None:
    draw_crossovers(panel, verdict, cells)
    draw_ratio(panel, cells)


def _panel(draw: Callable[[Axes], None]) -> Callable[[Figure], None]:
    return lambda figure: _drawn(figure.subplots(), draw)


def _drawn(panel: Axes, draw: Callable[[Axes], None]) -> None:
    """The figure has a title of its own."""
    draw(panel)
    panel.set_title("")
    legend = panel.get_legend()
    for text in () if legend is None else legend.get_texts():
        text.set_fontsize(8)


def _legs(prediction: StudyPrediction, calibrations: dict[str, Calibration], place: str, tag: str) -> tuple[Part, ...]:
    """A bar a workload at the largest k that was predicted for it."""
    points: dict[str, CalibrationPoint] = {}
    for cell in sorted(prediction.cells, key=lambda each: (each.payload_bytes, each.k)):
        point = calibrations[cell.workload].point(cell.k) if cell.workload in calibrations else None
        if point is not None and figures.legs_of(point):
            points[cell.workload] = point
    if not points:
        return (Sentence("The calibrations are not here, or state neither S nor D.", tone="undecided"),)
    rows, told = [], []
    for workload, point in points.items():
        sums = {group: sum(s for _, of, s in figures.legs_of(point) if of == group) for group in figures.GROUPS}
        rows.append(
            (
                words(workload),
                Cell(f"{point.payload_bytes / _KIB:.0f}", point.payload_bytes),
                number(point.k, "d"),
                *(number(1e3 * value_s, ".3g") for value_s in sums.values()),
            )
        )
        shares = ", ".join(f"{group} {1e3 * value_s:.3g}" for group, value_s in sums.items())
        told.append(f"{payload(point.payload_bytes)}: {shares}")
    return (
        Picture(
            name=f"{place}-legs",
            title=plain(f"One batch alone, by payload{f' ({tag})' if tag else ''}"),
            description=plain(f"Milliseconds of a cycle: {'; '.join(told)}."),
            data=Table(
                "Parts of a cycle, median of each leg, ms",
                ("workload", "payload, KiB", "k", *figures.GROUPS),
                tuple(rows),
            ),
            draw=lambda figure: figures.draw_legs_by_payload(figure, list(points.values())),
            size_in=(4.4, 1.3 + 0.3 * len(points)),
        ),
    )


def _crossovers_table(verdict: StudyVerdict) -> Table:
    return Table(
        "Crossover payload: above it the proxy's batching loses",
        ("transport", "k", "clients", "predicted", "measured", "error", "prediction within the measured interval"),
        tuple(
            (
                words(each.predicted.transport),
                Cell(str(each.predicted.k), each.predicted.k),
                Cell(str(each.predicted.concurrency), each.predicted.concurrency),
                _crossover_cell(each.predicted),
                _crossover_cell(each.measured),
                number(each.error, "+.1%"),
                words(EMPTY if each.inside is None else "yes" if each.inside else "no"),
            )
            for each in verdict.crossovers
        ),
    )


def _crossover_cell(of: Crossover) -> Cell:
    return Cell(_crossover(of), None if of.payload_bytes is None else of.payload_bytes.mean)


def _cells_table(cells: Sequence[MeasuredCell]) -> Table:
    return Table(
        "Each cell: measured, request/s, and what was predicted",
        ("workload", "payload, KiB", "transport", "k", "clients", "sessions", "X_C1", "predicted X_C1", "X_C2",
         "predicted X_C2", "X_C3", "predicted X_C3", "X_C3 / X_C1 - 1", "predicted gain", "R", "predicted R",
         "P99 spread, C1 / C3"),
        tuple(
            (
                *_labels(cell),
                Cell(str(cell.sessions), cell.sessions),
                *(
                    estimate(found, ".1f")
                    for name in ("c1_per_s", "c2_per_s", "c3_per_s")
                    for found in (getattr(cell, name), _promised(cell, name))
                ),
                estimate(cell.gain, "+.1%"),
                estimate(_promised(cell, "gain"), "+.1%"),
                _ratio(cell),
                _NONE if cell.predicted is None else _ratio(cell.predicted),
                estimate(cell.p99_spread_ratio, ".2f"),
            )
            for cell in cells
        ),
    )  # fmt: skip


def _predicted_table(cells: Sequence[PlacementCell]) -> Table:
    return Table(
        "Each cell as predicted, request/s",
        ("workload", "payload, KiB", "transport", "k", "clients", "X_C1", "X_C2", "X_C3", "X_C3 / X_C1 - 1", "R"),
        tuple(
            (*_labels(cell), estimate(cell.c1_per_s, ".1f"), estimate(cell.c2_per_s, ".1f"),
             estimate(cell.c3_per_s, ".1f"), estimate(cell.gain, "+.1%"), _ratio(cell))
            for cell in cells
        ),
    )  # fmt: skip


def _labels(cell: MeasuredCell | PlacementCell) -> tuple[Cell, ...]:
    return (
        words(cell.workload),
        Cell(f"{cell.payload_bytes / _KIB:.0f}", cell.payload_bytes),
        words(cell.transport),
        Cell(str(cell.k), cell.k),
        Cell(str(cell.concurrency), cell.concurrency),
    )


def _promised(cell: MeasuredCell, name: str) -> Estimate | None:
    found: Estimate | None = None if cell.predicted is None else getattr(cell.predicted, name)
    return found


def _ratio(cell: MeasuredCell | PlacementCell) -> Cell:
    return Cell("undefined") if cell.ratio is None else estimate(cell.ratio, ".2f")


def _undefined(cells: Sequence[MeasuredCell]) -> list[Sentence]:
    return [
        Sentence(plain(f"R of {cell.workload} at {cell.concurrency} clients is undefined: {cell.undefined}"))
        for cell in cells
        if cell.undefined is not None
    ]
