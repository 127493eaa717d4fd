"""Folders of records to report on: small ones of every outcome, and one in which every free text is an attack."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import builders
from pydantic import ValidationError

from b2gmodel.judge import judge
from b2gmodel.ledger import Ledger
from b2gmodel.records import (
    Calibration,
    Diagnostic,
    Estimate,
    Host,
    LegTimes,
    Measurement,
    PlacementScore,
    Record,
    Software,
    Verdict,
    digest_of,
)
from b2gmodel.report.report_cases import gather
from b2gmodel.report.report_page import Page, page_of

RecordT = TypeVar("RecordT", bound=Record)
CURVE = {1: [310.0, 330.0, 322.0], 2: [580.0, 600.0, 590.0], 3: [790.0, 795.0, 800.0], 4: [780.0, 790.0, 785.0]}
HOSTILE = (
    "<script>window.bad=1</script>",
    '"><img src=x onerror="window.bad=2">',
    "{{7*7}}",
    "]]>",
    "--><b onclick=window.bad=3>",
    "`` ```\n# h",
    "[l](javascript:window.bad=4) ![i](https://evil.invalid/x.png)",
    "https://evil.invalid/ <https://evil.invalid/>",
    "$x^$ \\(y\\) | & &lt; 日",
    "\u202eRTL\u2066\u0007\u0000",
)
ATTACK = " ".join(HOSTILE)
LEGS = LegTimes(
    cycles=20, formation_wait_s=1e-5, pack_s=2e-4, send_s=4e-3, server_receive_s=-1e-4, queue_s=1e-4,
    compute_input_s=1e-3, compute_infer_s=8e-3, compute_output_s=1e-3, return_s=2e-3, unsplit_s=None, deliver_s=1e-4,
    residual_s=1e-4, residual_share=0.0, trace_difference=0.0,
)  # fmt: skip


def calibration(**changes: object) -> Calibration:
    point = builders.point().model_copy(update={"legs": LEGS})
    return builders.calibration(point, model=builders.model_info(**changes))


def kept(
    folder: Path,
    curve: Mapping[int, Sequence[float]] | None = CURVE,
    *,
    of: Calibration | None = None,
    judged: bool = True,
    **changes: object,
) -> str:
    """Calibration, prediction and, where there is a curve, measurement and verdict, in folders of their own.

    Returns:
        The prediction's digest.
    """
    source = of or calibration()
    if not (folder / "calibration" / f"{source.name}.json").exists():
        builders.written(folder / "calibration", source)
    ledger, predicted = Ledger(folder / "predictions"), builders.prediction(source)
    ledger.freeze(predicted)
    if curve is not None:
        measured = builders.measurement(predicted, curve, baseline=200.0, **changes)
        enter(ledger, measured, judge(predicted, measured) if judged else None)
    return digest_of(predicted)


def enter(ledger: Ledger, measured: Measurement, verdict: Verdict | None) -> None:
    file = builders.written(ledger.folder, measured).name
    assert measured.prediction_digest is not None
    ledger.note("measure", measured.prediction_digest, file, measurement=digest_of(measured))
    if verdict is not None:
        ledger.enter_verdict(measured.name, verdict)


def paged(folder: Path, *wanted: str) -> Page:
    return page_of(gather(Ledger(folder / "predictions"), wanted, folder / "calibration"))


def hostile(folder: Path) -> str:
    """A case in which every free text of every record is an attack; the prediction's digest."""
    notes = ("a note",)
    host = Host(machine="m", processor="p", cores=2, memory_bytes=None, kernel="k", governor="g", gpu="gpu")
    software = Software(b2gmodel="0", commit="c", python="3", packages={ATTACK: "1"})
    facts = {"host": host, "software": software, "notes": notes}
    source = spoiled(calibration().model_copy(update=facts))
    builders.written(folder / "calibration", source)
    warning = Diagnostic(name="d", observed=1.0, bound=2.0, sentence="s")
    clean = builders.prediction(source).model_copy(update={"software": software, "notes": notes})
    predicted = spoiled(clean.model_copy(update={"diagnostics": (warning,)}))
    measured = builders.measurement(predicted, CURVE, baseline=200.0)
    verdict = judge(predicted, measured)
    measured = spoiled(measured.model_copy(update=facts))
    placement = PlacementScore(concurrency=8, ratio=None, undefined="why", gain=Estimate(mean=0.1))
    update = {"measurement_digest": digest_of(measured), "placement": placement}
    ledger = Ledger(folder / "predictions")
    ledger.freeze(predicted)
    enter(ledger, measured, spoiled(verdict.model_copy(update=update)))
    return digest_of(predicted)


def spoiled(record: RecordT) -> RecordT:
    """The record with an attack before every text in it that is not bound to a form of its own."""
    facts, kind = record.model_dump(mode="json"), type(record)
    bound = set()
    for holder, key, place in list(_texts(facts)):
        if place in bound:
            continue
        before = holder[key]
        holder[key] = f"{ATTACK} {before}"
        try:
            kind.model_validate_json(json.dumps(facts))
        except ValidationError:
            holder[key] = before
            bound.add(place)
    return kind.model_validate_json(json.dumps(facts))


def _texts(facts: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Each text: what holds it, under which key, and its place; those of one list have one place."""
    is_list = isinstance(facts, list)
    for key, value in enumerate(facts) if is_list else facts.items():
        here = place if is_list else f"{place}.{key}"
        if isinstance(value, str):
            yield facts, key, here
        elif isinstance(value, (dict, list)):
            yield from _texts(value, here)
