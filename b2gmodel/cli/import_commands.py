"""Commands that exchange data with other tools: import, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import CalibrationFolder, Json
from b2gmodel.cli.output import say, say_json
from b2gmodel.errors import UsageError

if TYPE_CHECKING:
    from b2gmodel.foreign.answer import Answer
    from b2gmodel.foreign.findings import Finding
    from b2gmodel.records import Calibration, Measurement

_MOST_FILES: Final = 8


def register(app: typer.Typer) -> None:
    add_command(
        app,
        import_,
        name="import",
        example="b2g import sweep.csv --advise",
        exits={2: "wrong use, or no file that is read", 3: "the file carries no answer"},
    )
    add_command(
        app,
        export,
        example="b2g export predictions/NAME-measured.json --out sweep.csv",
        exits={3: "nothing to export"},
    )


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Of one run: perf_analyzer's CSV, log or profile export, or Model Analyzer's inference table.",
            show_default=False,
        ),
    ],
    advise: Annotated[bool, typer.Option("--advise", help="Say M* and the gain still on the table.")] = False,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, max=65_536, help="The client's batch size, if no file states it."),
    ] = None,
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="SIZE", help="Bytes of one request, 588KiB, if known.")
    ] = None,
    instances: Annotated[
        int | None, typer.Option("--instances", min=1, max=1024, help="Model instances g, if no file states it.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Which Model Config Path of a Model Analyzer table.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the records. Default: the file's.")] = None,
    out: CalibrationFolder = Path("calibration"),
    json: Json = False,
) -> int:
    """Take another tool's sweep as calibration and measurement."""
    import hashlib
    from dataclasses import asdict, replace

    from b2gmodel.foreign import convert
    from b2gmodel.foreign.answer import answer_of
    from b2gmodel.foreign.content import read_sweep
    from b2gmodel.foreign.enough import must_carry, usable
    from b2gmodel.foreign.findings import findings_of
    from b2gmodel.foreign.join import join
    from b2gmodel.store import check_name, sha256_of_file, write_record

    if len(files) > _MOST_FILES:
        raise UsageError(
            "too many files for one run", observed=len(files), allowed=f"<= {_MOST_FILES}", where="FILE",
            hint="import one run at a time",
        )  # fmt: skip
    named = check_name(name or _name_of(files[0]), where="--name")
    payload_bytes = None if payload is None else _bytes(payload)
    read = [read_sweep(path, configuration=config, batch_size=batch_size) for path in files]
    must_carry(read)
    sweep = usable(join(read, batch_size))
    sweep = replace(sweep, instances=_instances(sweep.instances, instances))
    findings = findings_of(sweep, payload_bytes)
    digests = [sha256_of_file(path) for path in files]
    source = "; ".join(
        f"{each.kinds[0].value} {each.where}, sha256 {digest}" for each, digest in zip(read, digests, strict=True)
    )
    calibration = convert.calibration(sweep, findings, name=named, source=source, payload_bytes=payload_bytes)
    measurement = convert.measurement(
        sweep,
        findings,
        name=named,
        source=source,
        digest=hashlib.sha256("".join(digests).encode()).hexdigest(),
        payload_bytes=payload_bytes,
    )
    answer = answer_of(sweep, findings)
    written = write_record(out / f"{named}.json", calibration)
    measured = None if measurement is None else write_record(out / f"{named}-measured.json", measurement)
    if json:
        say_json(
            {
                "answer": asdict(answer),
                "batch_size": sweep.batch_size,
                "calibration": str(written),
                "findings": [asdict(finding) for finding in findings],
                "measurement": None if measured is None else str(measured),
                "read": [{"file": each.where, "kind": each.kinds[0].value} for each in read],
            }
        )
    else:
        say(answer.sentence if advise else _imported(calibration, measurement))
        if advise:
            say(f"  {_imported(calibration, measurement)}")
        _tell(
            answer.facts if advise else answer.facts[:1],
            findings,
            batch_is_stated=any(each.batch_size for each in read) or batch_size is not None,
        )
        say(f"written: {written}{'' if measured is None else f', {measured}'}")
        say(f"next: {_next(answer, measured, written)}")
    return 3 if advise and answer.m_star is None else 0


def export(
    measurement: Annotated[Path, typer.Argument(help="A measurement of ours.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write it. Default: stdout.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Write a measurement as perf_analyzer's CSV."""
    from b2gmodel.foreign.export import export_csv
    from b2gmodel.records import Measurement
    from b2gmodel.store import read_record, write_atomically

    exported = export_csv(read_record(measurement, Measurement))
    if out is not None:
        content = exported.text.encode()
        try:
            write_atomically(out, lambda stream: stream.write(content))
        except FileExistsError:
            raise UsageError("the file exists", where=str(out), hint="choose another name") from None
    if json:
        file = None if out is None else str(out)
        say_json({"csv": exported.text, "file": file, "notes": list(exported.notes), "rows": exported.rows})
        return
    if out is None:
        typer.echo(exported.text, nl=False)
        return
    say(f"{exported.rows} row(s) written: {out}")
    for note in exported.notes:
        say(f"  {note}")
    say(f"next: b2g import {out}")


def _name_of(path: Path) -> str:
    """A name from a stranger's file name."""
    import re

    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip(".-")[:100] or "imported"


def _bytes(text: str) -> int:
    """Bytes from ``588KiB``. Raises ``UsageError``."""
    import re

    factors = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    size = None if match is None else float(match[1]) * factors.get(match[2].lower(), 0)
    if not size or size < 1 or size > 1 << 40:
        raise UsageError(
            "not a size", observed=text, allowed="a number with B, KiB, MiB, kB or MB, up to 1 TiB", where="--payload",
            hint="write, for example, --payload 588KiB",
        )  # fmt: skip
    return round(size)


def _instances(stated: int | None, given: int | None) -> int | None:
    if stated is not None and given not in (None, stated):
        raise UsageError(
            "the file states another number of instances",
            observed=given,
            allowed=str(stated),
            where="--instances",
            hint="leave it out",
        )
    return stated or given


def _imported(calibration: Calibration, measurement: Measurement | None) -> str:
    """What was made of the file."""
    from b2gmodel.units import format_duration

    (point,) = calibration.points
    assert point.cycle_s is not None
    assert point.service_s is not None
    assert point.transport_s is not None
    rows = "" if measurement is None else f", and {len(measurement.sessions[0].runs)} rows measured, not pre-registered"
    return (
        f"{calibration.name}: S = {format_duration(point.service_s.mean)}, "
        f"D = {format_duration(point.transport_s.mean)} for batches of {point.k}{rows}"
    )


def _tell(facts: Sequence[str], findings: Sequence[Finding], *, batch_is_stated: bool) -> None:
    for fact in facts:
        say(f"  {fact}")
    if not batch_is_stated:
        say("  batch size: not stated; the one k that fits X C / k <= 1 at concurrency 1")
    for finding in findings:
        say(f"  {finding.line}")


def _next(answer: Answer, measurement: Path | None, calibration: Path) -> str:
    if answer.m_star is None:
        return "give --instances if it is that; else b2g calibrate on that server, which asks it how it merges"
    if measurement is None or answer.at_m_star_per_s is None:
        return f"b2g predict {calibration}; to hold it to its word, measure concurrency {answer.m_star}, too"
    return f"b2g predict {calibration}, then b2g validate PREDICTION {measurement}"
