"""What a file is, by its content: never by its name, which people choose.

Rules here: a stranger's file is measured before it is read, and text before it is parsed; each refusal is one line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.foreign import model_analyzer, perf_csv, perf_log, profile_json
from b2gmodel.foreign.rows import Kind, Sweep

SIZE_LIMIT_BYTES: Final = 256 * 1024 * 1024
_READS: Final = ", ".join(kind.value for kind in Kind)
_SIGNATURES: Final = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"PK\x03\x04", "a zip archive (or a spreadsheet)"),
    (b"\x1f\x8b", "gzip-compressed"),
    (b"%PDF", "a PDF document"),
    (b"PAR1", "a Parquet file"),
)
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_LLM: Final = re.compile(r"time.to.first.token|inter.token.latency|output.token.throughput|tokens?.per.sec", re.I)


def read_sweep(path: Path, *, configuration: str | None = None, batch_size: int | None = None) -> Sweep:
    """The sweep in a file.

    Args:
        configuration: of a Model Analyzer table, where it holds several; so ``batch_size``.

    Raises:
        UsageError: no such file, or none that is read here, or malformed.
        EvidenceError: well-formed, and no answer in it.
    """
    content = _bytes_of(path)
    for signature, what in _SIGNATURES:
        if content.startswith(signature):
            raise _foreign(path, what)
    if content.startswith(_UTF16):
        raise _foreign(path, "UTF-16 text", "save it as UTF-8")
    if control := _CONTROL.search(content):
        raise _foreign(path, f"no text: byte {control[0][0]:#04x} at offset {control.start()}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _foreign(path, f"bytes that are no UTF-8 at offset {error.start}") from None
    # A file's name may be no text, and records are.
    name = path.name.encode("utf-8", "replace").decode()
    return parse_sweep(text, name, configuration=configuration, batch_size=batch_size)


def parse_sweep(text: str, name: str, *, configuration: str | None = None, batch_size: int | None = None) -> Sweep:
    """As :func:`read_sweep`, from text; ``name`` names it in errors."""
    if not text.strip():
        raise UsageError("the file is empty", allowed=_READS, where=name)
    kind = recognise(text)
    if kind is Kind.CSV:
        return perf_csv.parse(text, name)
    if kind is Kind.LOG:
        return perf_log.parse(text, name)
    if kind is Kind.PROFILE:
        return profile_json.parse(text, name)
    if kind is Kind.TABLE:
        return model_analyzer.parse(text, name, configuration=configuration, batch_size=batch_size)
    head = text.lstrip()[:2000]
    if _LLM.search(head):
        raise EvidenceError(
            "an export of a tool for language models",
            observed=head.splitlines()[0][:60],
            allowed="one answer a request, with the server's compute times",
            where=name,
            hint="M* is about batches that are answered at once; tokens that stream are not",
        )
    if head[:1] == "<":
        raise _foreign(Path(name), "HTML or XML", "download the raw file")
    raise _foreign(Path(name), head.splitlines()[0][:60])


def recognise(text: str) -> Kind | None:
    """What wrote this text, or None."""
    head = text.lstrip()[:100_000]
    if head[:1] in "{[":
        return Kind.PROFILE if '"experiments"' in text else None
    first = head.splitlines()[0] if head else ""
    if "Inferences/Second" in first and "," in first:
        return Kind.CSV
    if first.startswith("Model,") or "Model Config Path" in first or ("," in first and "Throughput (" in first):
        return Kind.TABLE
    if perf_log.SETTINGS in head or perf_log.BEGIN.search(head) is not None:
        return Kind.LOG
    return None


def _bytes_of(path: Path) -> bytes:
    try:
        if path.stat().st_size > SIZE_LIMIT_BYTES:
            raise UsageError(
                "the file is too long",
                observed=f"{path.stat().st_size} bytes",
                allowed=f"<= {SIZE_LIMIT_BYTES} bytes",
                where=str(path),
                hint="export fewer concurrencies at a time",
            )
        if not path.is_file():
            raise UsageError("not a regular file", allowed=_READS, where=str(path))
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            "cannot read the file", observed=error.strerror, where=str(path), hint="check the path"
        ) from error


def _foreign(path: Path, what: str, hint: str = "see docs/import.md for what is read") -> UsageError:
    return UsageError(
        "this is no file that is read here",
        observed=what,
        allowed=_READS,
        where=str(path),
        hint=hint,
    )
