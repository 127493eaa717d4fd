"""A case of one model as it is shown: the verdict, what to set, the figures, the tables, where it comes from."""

from __future__ import annotations

import shlex
from typing import Final

from b2gmodel.advice_settings import Confidence, Placed, Wanted, settings
from b2gmodel.measured import MeasuredPoint, measured_curve
from b2gmodel.records import Calibration, CalibrationPoint, CurvePoint, Estimate, Measurement, Prediction, Verdict
from b2gmodel.report import report_figures as figures
from b2gmodel.report.report_cases import Case, record_of
from b2gmodel.report.report_parts import (
    CaseView,
    Cell,
    Code,
    Part,
    Picture,
    Section,
    Sentence,
    Table,
    estimate,
    facts,
    interval,
    number,
    payload,
    plain,
    plain_lines,
    words,
)
from b2gmodel.report.report_provenance import provenance
from b2gmodel.report.report_scores import (
    SCORED,
    checks_table,
    diagnostics_table,
    evidence_table,
    heights_table,
    runs_table,
    scores_table,
)

EMULATED: Final = "emulated compute"
NOT_PREREGISTERED: Final = "not pre-registered"
NOT_JUDGED: Final = "not judged"
_WHY_WAIT: Final = "a partial batch goes after one mean cycle: callers who fill all flights never wait for it"
_CONFIDENCE: Final[dict[str, Confidence]] = {"held": "high", "refuted": "medium", "inconclusive": "low"}


def model_view(case: Case, prediction: Prediction) -> CaseView:
    """All that is known of one model's prediction."""
    measurement, verdict = record_of(case.measurement, Measurement), record_of(case.verdict, Verdict)
    kept = case.calibrations.get(prediction.calibration_digest)
    calibration = None if kept is None else kept.record
    place = f"case-{case.prediction.digest[:8]}" + (f"-{case.measurement.digest[:8]}" if case.measurement else "")
    tag = EMULATED if prediction.model.compute == "emulated" else ""
    name = f"{prediction.model.name}{f' ({tag})' if tag else ''}"
    preregistered = verdict.preregistered if verdict else measurement is None or measurement.preregistered
    setting, set_parts = _to_set(prediction, calibration, verdict, preregistered)
    sections = [
        Section("What to set", set_parts, tag),
        Section("Throughput against batches in flight", _throughput(prediction, measurement, place, name), tag),
        Section("Where the time goes", _legs(prediction, calibration, place, name), tag),
        Section("What binds", _binding(prediction), tag),
    ]
    if verdict is not None:
        sections += [
            Section("Claims", (checks_table(verdict.checks),), tag),
            Section("Heights", (heights_table(verdict.heights),), tag),
        ]
        if verdict.scores:
            scores = scores_table(verdict.scores, "Scores of each predictor")
            sections.append(Section("Predictors", (scores, Sentence(SCORED)), tag))
        if verdict.placement is not None:
            sections.append(Section("Placement", _placement(verdict), tag))
        sections.append(Section("Evidence", (evidence_table(verdict.evidence),)))
    told = _notes(prediction, calibration, measurement, verdict)
    sections += [Section("Diagnostics and notes", told, tag)] if told else []
    sections.append(provenance(case))
    return CaseView(
        place=place,
        title=plain(f"{name}, {payload(prediction.payload_bytes)}, {_how(prediction)}"),
        outcome=verdict.outcome if verdict else NOT_JUDGED,
        sentence=plain(verdict.sentence if verdict else _promise(prediction)),
        tags=tuple(filter(None, (tag, "" if preregistered else NOT_PREREGISTERED))),
        setting=setting,
        missing=case.missing,
        sections=tuple(sections),
    )


def _how(of: Prediction) -> str:
    return f"{f'k = {of.k}' if of.k else 'k not stated'}, {of.transport or 'transport not stated'}"


def _promise(of: Prediction) -> str:
    """The sentence of a case without a verdict."""
    place, best = of.predictors[0], of.best
    at = best.at(place.m_star) or best.curve[-1]
    most = "at most " if best.kind == "upper bound" else ""
    return (
        f"Predicted and not judged: the peak at M* = {place.m_star}, with {most}"
        f"{interval(at.throughput_per_s, at.low, at.high)} request/s there ({best.name})."
    )


def _to_set(
    prediction: Prediction, calibration: Calibration | None, verdict: Verdict | None, preregistered: bool
) -> tuple[str, tuple[Part, ...]]:
    """In a few words, and in full with what to paste. Evidence that is invalid recommends nothing."""
    m_star = prediction.predictors[0].m_star
    confidence: Confidence = "low"
    so_far = ""
    if verdict is None:
        flights, so_far, why = m_star, ", predicted alone", "It is predicted, and no verdict confirms it."
    elif verdict.outcome == "invalid":
        return "nothing yet", (
            Sentence("Set nothing on this evidence: mend what failed, and measure the frozen prediction again.",
                     tone="undecided"),
        )  # fmt: skip
    elif verdict.checks and verdict.checks[0].outcome == "refuted":
        flights, confidence = verdict.best_flights, "medium"
        why = f"The measured peak is there, not at the predicted M* = {verdict.m_star}."
    elif verdict.checks and verdict.checks[0].outcome == "inconclusive":
        flights, so_far = m_star, ", predicted and not decided"
        why = f"It is predicted, and {verdict.sessions} sessions do not decide whether it is among the best."
    else:
        flights, confidence = m_star, _CONFIDENCE[verdict.outcome]
        why = "It was predicted, and the measured peak is no higher than the bound allows."
        if verdict.outcome == "refuted":
            why += " Plan on the throughput that was measured there, not on what was predicted."
    if not preregistered:
        why += " The figures were measured before the prediction was made."
        confidence = "medium" if confidence == "high" else confidence
    head = Sentence(f"M = {flights} batches in flight" + (f" of k = {prediction.k}. " if prediction.k else ". ") + why)
    setting = f"M = {flights}{so_far}"
    if calibration is None or prediction.k is None:
        lacks = "the calibration is not here" if calibration is None else "the batch size is not stated"
        return setting, (head, Sentence(f"There is no command to paste: {lacks}."))
    address = calibration.server.address if calibration.server else None
    if any(text and shlex.quote(text) != text for text in (calibration.model.name, calibration.transport, address)):
        return setting, (head, Sentence("There is no command to paste: a name in it would mean something to a shell."))
    if prediction.model.dynamic_batching:
        return setting, (head, Sentence("The server merges requests of its own: b2g advise compares the two."))
    placed: Placed = "C1" if prediction.k == 1 else "C3" if flights == 1 else "C4"
    wait_s = None if placed == "C1" else prediction.cycle_s
    wanted = Wanted(calibration, placed, prediction.k, flights, wait_s, _WHY_WAIT, confidence)
    pasted = sorted(settings(wanted), key=lambda each: each.where != "b2g-serve")
    codes = [Code(f"{each.where}, confidence {each.confidence}: {plain(each.reason)}", plain_lines(each.text))
             for each in pasted]  # fmt: skip
    return setting, (head, *codes)


def _throughput(prediction: Prediction, measurement: Measurement | None, place: str, name: str) -> tuple[Part, ...]:
    """The figure, with measured means and intervals in its words, and every curve in its table."""
    curve = {} if measurement is None else {point.flights: point for point in measured_curve(measurement)}
    shown = [result for result in prediction.predictors if result.curve]
    flights = sorted(set(curve) | {at for at in prediction.plan.flights if not curve})
    rows: list[tuple[Cell, ...]] = []
    for at in flights:
        cells = [Cell(str(at), at)]
        if measurement is not None:
            cells.append(_measured(curve[at]))
        cells += [_promised(result.at(at)) for result in shown]
        rows.append(tuple(cells))
    columns = ("M", *(["measured"] if measurement else []), *(plain(f"{each.name} ({each.kind})") for each in shown))
    place_m = prediction.predictors[0]
    told = "; ".join(f"M = {row[0].text}: {row[1].text}" for row in rows)
    kind = "Measured" if measurement else f"Promised by {shown[0].name}"
    picture = Picture(
        name=f"{place}-throughput",
        title=plain(f"{name}: throughput against batches in flight"),
        description=plain(f"{kind} throughput in request/s: {told}. {place_m.name} puts M* at {place_m.m_star}."),
        data=Table("X(M) in request/s, with 90 % intervals where there are any", columns, tuple(rows)),
        draw=lambda figure: figures.draw_throughput(figure, prediction, measurement),
        size_in=(4.4, 3.7),
    )
    if measurement is None:
        return (picture, Sentence("Nothing measured is shown.", tone="undecided"))
    return (picture, runs_table(measurement))


def _measured(point: MeasuredPoint) -> Cell:
    span = point.interval
    low, high = (None, None) if span is None else (span.low, span.high)
    return Cell(interval(point.mean, low, high, ".1f"), point.mean)


def _promised(point: CurvePoint | None) -> Cell:
    if point is None:
        return number(None)
    return Cell(interval(point.throughput_per_s, point.low, point.high, ".1f"), point.throughput_per_s)


def _legs(prediction: Prediction, calibration: Calibration | None, place: str, name: str) -> tuple[Part, ...]:
    """One cycle of a lone batch, as far as the calibration knows its parts."""
    point = None if calibration is None else calibration.point(prediction.k)
    if point is None:
        return (Sentence("The calibration is not here, and with it the times of a cycle.", tone="undecided"),)
    legs = figures.legs_of(point)
    if not legs:
        share = point.transport_share
        known = "" if share is None else f" It states the transport share D / (D + S): {share.mean:.0%}."
        return (Sentence(f"The source states neither S nor D, so no times can be shown.{known}"), _times(point))
    whole_s = sum(value for *_, value in legs)
    parts = "; ".join(f"{leg} {1e3 * value:.3g} ms ({value / whole_s:.0%})" for leg, _, value in legs)
    rows = [
        (words(leg), words(group), number(1e3 * value, ".4g"), Cell(f"{value / whole_s:.1%}", value / whole_s))
        for leg, group, value in legs
    ]
    picture = Picture(
        name=f"{place}-legs",
        title=plain(f"{name}: one batch alone, from seal to delivery"),
        description=plain(f"Of {1e3 * whole_s:.3g} ms: {parts}."),
        data=Table("Legs of a cycle, in order", ("leg", "part", "median, ms", "share"), tuple(rows)),
        draw=lambda figure: figures.draw_legs(figure, legs),
        size_in=(4.4, 1.3 + 0.24 * len(legs)),
    )
    return (picture, _times(point))


def _times(point: CalibrationPoint) -> Table:
    """C, S, D and their kin as calibrated."""
    rows = [
        (name, scale, value)
        for name, scale, value in (
            ("cycle C, ms", 1e3, point.cycle_s),
            ("service time S, ms", 1e3, point.service_s),
            ("transport overhead D, ms", 1e3, point.transport_s),
            ("server's queue, ms", 1e3, point.queue_s),
            ("transport share D / (D + S)", 1.0, point.transport_share),
        )
        if value is not None
    ]
    return Table(
        "Means of one batch at a time, as calibrated",
        ("quantity", "mean [95 % interval]", "coefficient of variation"),
        tuple(
            (words(name), Cell(_scaled(value, scale), value.mean * scale), number(value.cv, ".3f"))
            for name, scale, value in rows
        ),
    )


def _scaled(found: Estimate, scale: float) -> str:
    low, high = (None if limit is None else scale * limit for limit in (found.low, found.high))
    return interval(scale * found.mean, low, high)


def _binding(of: Prediction) -> tuple[Part, ...]:
    binding = of.binding
    rows = (
        (words("compute"), number(binding.compute_limit_per_s, ".1f")),
        (words("transport"), number(binding.transport_limit_per_s, ".1f")),
        (words("the larger over the smaller"), estimate(binding.margin, ".2f")),
    )
    limits = Table("What each can carry, request/s", ("limit", "request/s"), rows)
    return (Sentence(plain(binding.sentence)), limits)


def _placement(verdict: Verdict) -> tuple[Part, ...]:
    found = verdict.placement
    assert found is not None
    ratio = f"undefined: {found.undefined}" if found.ratio is None else estimate(found.ratio, ".2f").text
    rows = (
        ("concurrent clients", str(found.concurrency)),
        ("R = (X_C3 - X_C1) / (X_C2 - X_C1)", ratio),
        ("gain of the proxy, X_C3 / X_C1 - 1", estimate(found.gain, "+.1%").text),
        ("without batching (C1), request/s", number(verdict.baseline_per_s, ".1f").text),
    )
    return (facts("Batching in the proxy against the server's own", rows),)


def _notes(
    prediction: Prediction, calibration: Calibration | None, measurement: Measurement | None, verdict: Verdict | None
) -> tuple[Part, ...]:
    """Each said once, with the record that says it."""
    diagnostics = dict.fromkeys((*prediction.diagnostics, *(verdict.diagnostics if verdict else ())))
    parts: list[Part] = [diagnostics_table(list(diagnostics))] if diagnostics else []
    for of, notes in (
        ("calibration", calibration.notes if calibration else ()),
        ("prediction", prediction.notes),
        ("measurement", measurement.notes if measurement else ()),
    ):
        parts += [Sentence(plain(f"{of}: {note}")) for note in notes]
    return tuple(parts)
