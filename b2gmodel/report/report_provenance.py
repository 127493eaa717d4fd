"""Where a case comes from: digests, the ledger's lines, who made it with what, and the commands that make it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from b2gmodel.placement_records import StudyMeasurement
from b2gmodel.records import Clock, Host, Prediction, Software
from b2gmodel.report.report_cases import Case
from b2gmodel.report.report_parts import Cell, Code, Part, Section, Sentence, Table, facts, plain, words

_SHORT: int = 8


def provenance(case: Case) -> Section:
    """The last section of a case."""
    parts: list[Part] = [Sentence(text, tone="undecided") for text in case.missing]
    parts += [_digests(case), _ledger(case), facts("Made by", _makers(case)), _commands(case)]
    return Section("Provenance", tuple(parts))


def _digests(case: Case) -> Table:
    """Each record of the chain; all digests are whole, so that they can be compared."""
    rows = [("calibration", each.digest, each.file) for each in case.calibrations.values()]
    rows.append(("prediction", case.prediction.digest, case.prediction.file))
    for name, kept in (("measurement", case.measurement), ("verdict", case.verdict)):
        if kept is not None:
            rows.append((name, kept.digest, kept.file))
    return Table(
        "Records and their SHA-256",
        ("record", "digest", "file"),
        tuple(tuple(words(text) for text in row) for row in rows),
        wide=frozenset({"digest", "file"}),
    )


def _ledger(case: Case) -> Table:
    return Table(
        "The ledger's lines about this prediction",
        ("line", "event", "at", "file", "digest of the line"),
        tuple(
            (Cell(str(number), number), words(entry.event), words(entry.facts["at"]), words(entry.file),
             words(entry.line_digest))
            for number, entry in case.entries
        ),
        wide=frozenset({"file", "digest of the line"}),
    )  # fmt: skip


def _makers(case: Case) -> list[tuple[str, str]]:
    """Software, host and clock; each said once where calibration and measurement agree."""
    made = [("calibration", each.record.software, each.record.host, each.record.clock)
            for each in case.calibrations.values()]  # fmt: skip
    made.append(("prediction", case.prediction.record.software, None, None))
    if case.measurement is not None:
        of = case.measurement.record
        made.append(("measurement", of.software, of.host, of.clock))
    rows: dict[tuple[str, str], None] = {}
    for name, software, host, clock in made:
        rows[f"{name}: software", _software(software)] = None
        if name != "prediction":
            rows[f"{name}: host", _host(host)] = None
            rows[f"{name}: clock", _clock(clock)] = None
    if case.measurement is not None and not isinstance(case.measurement.record, StudyMeasurement):
        rows["measurement: source", case.measurement.record.source] = None
    return list(rows)


def _software(of: Software | None) -> str:
    if of is None:
        return "not stated"
    packages = ", ".join(f"{name} {version}" for name, version in sorted(of.packages.items()))
    return "; ".join(
        [f"b2gmodel {of.b2gmodel} (commit {of.commit or 'not stated'}), Python {of.python}"]
        + ([packages] if packages else [])
        + ([f"environment {of.lock_digest}"] if of.lock_digest else [])
    )


def _host(of: Host | None) -> str:
    if of is None:
        return "not stated"
    memory = "memory not stated" if of.memory_bytes is None else f"{of.memory_bytes / 2**30:.1f} GiB"
    governor = f", governor {of.governor}" if of.governor else ""
    gpu = of.gpu or "no GPU stated"
    return f"{of.processor}, {of.machine}, {of.cores} cores, {memory}, {gpu}, Linux {of.kernel}{governor}"


def _clock(of: Clock | None) -> str:
    return "not stated" if of is None else f"{of.domain}, boot {of.boot_id}"


def _commands(case: Case) -> Code:
    """What makes these records again, from the folder that holds the two folders."""
    short = case.prediction.digest[:_SHORT]
    predictions = case.prediction.file.split("/", 1)[0]
    where = [] if predictions == "predictions" else ["--predictions", predictions]
    lines: list[Sequence[str]] = [["b2g", "ledger", "verify", *where]]
    record = case.prediction.record
    if isinstance(record, Prediction):
        kept = case.calibrations.get(record.calibration_digest)
        calibration = f"{record.calibration_name}.json" if kept is None else kept.file
        lines.append(_predict(record, calibration, where))
        if case.measurement is None or case.measurement.file.startswith(f"{predictions}/"):
            lines += [["b2g", "measure", short, *where], ["b2g", "validate", short, *where]]
        else:
            lines.append(["b2g", "validate", short, case.measurement.file, *where])
    else:
        lines.append(["b2g", "validate", short, *where])
    lines.append(["b2g", "report", short, *where])
    return Code("Commands to make this again", "\n".join(plain(shlex.join(line)) for line in lines))


def _predict(of: Prediction, calibration: str, where: Sequence[str]) -> list[str]:
    """With the software that is stated above, this freezes the same bytes."""
    k = [] if of.k is None else ["-k", str(of.k)]
    simulated = any(result.name == "simulation" for result in of.predictors)
    last = max(point.flights for result in of.predictors for point in result.curve)
    return ["b2g", "predict", calibration, *k, "--flights", ",".join(map(str, of.plan.flights)), "--up-to", str(last),
            "--sessions", str(of.plan.sessions), "--seconds", f"{of.plan.seconds_per_run:g}s",
            "--draws", str(of.draws), "--seed", str(of.seed), *([] if simulated else ["--analytic"]),
            "--name", of.name, *where]  # fmt: skip
