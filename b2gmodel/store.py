"""The only reader and writer of record files.

Rules: write beside, fsync, rename; never overwrite; read within a size limit, validate before use; a damaged file
is one clear line. Record files are canonical JSON and end without a line break, so the file's own SHA-256 is the
record's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import rfc8785
from pydantic import ValidationError

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import NAME_PATTERN, Calibration, RawFile, Record, canonical_bytes
from b2gmodel.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RecordT = TypeVar("RecordT", bound=Record)

SIZE_LIMIT_BYTES: Final = 64 * 1024 * 1024


def check_name(name: str, *, where: str) -> str:
    """``name``, if it may become part of a file name. Raises ``UsageError``."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            "this cannot be a name",
            observed=name,
            allowed="letters, digits, '.', '-' and '_', at most 128, not starting with '.' or '-'",
            where=where,
        )
    return name


def write_atomically(path: Path, fill: Callable[[IO[bytes]], object], *, replace: bool = False) -> None:
    """Create ``path`` with what ``fill`` writes, whole or not at all.

    Args:
        replace: take the place of a file that is there; for what can be made again, never for records.

    Raises:
        FileExistsError: there is such a file already, without ``replace``; it is left as it is.
        UsageError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(beside, 0o644)
        if replace:
            os.replace(beside, path)
        else:  # a hard link refuses to take the place of what is there
            os.link(beside, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        "cannot write the file",
        observed=error.strerror or str(error),
        where=str(path),
        hint="make room or choose another folder; nothing was left half-written",
    )


def sync_folder(folder: Path) -> None:
    """Make names that were added to a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_record(path: Path, record: Record) -> Path:
    """Write a record; the same content again is the same file.

    Raises:
        UsageError: the path holds something else already.
    """
    content = canonical_bytes(record)
    try:
        write_atomically(path, lambda stream: stream.write(content))
    except FileExistsError:
        if path.read_bytes() != content:
            raise UsageError(
                "the file exists and holds something else",
                where=str(path),
                hint="records are never overwritten: choose another name, or move the file away yourself",
            ) from None
    return path


def read_bytes(path: Path) -> bytes:
    """A record file's bytes. Raises ``UsageError`` where it cannot be read, ``EvidenceError`` where it is too long."""
    try:
        with path.open("rb") as stream:
            content = stream.read(SIZE_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(
            "cannot read the file", observed=error.strerror, where=str(path), hint="check the path"
        ) from error
    if len(content) > SIZE_LIMIT_BYTES:
        raise EvidenceError("the record is too long", allowed=f"<= {SIZE_LIMIT_BYTES} bytes", where=str(path))
    return content


def read_record(path: Path, *record_types: type[RecordT]) -> RecordT:
    """A validated record of that type, or of one of those.

    Raises:
        UsageError: no such file, or a record of another kind.
        EvidenceError: truncated, not canonical, or not of the stated form.
    """
    return parse_record(read_bytes(path), *record_types, where=str(path))


def parse_record(content: bytes, *record_types: type[RecordT], where: str) -> RecordT:
    """As ``read_record``, from bytes; where several types are given, the one that the record names."""
    by_kind = {str(each.model_fields["record"].default): each for each in record_types}
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(
            "the record is damaged or truncated: it is not JSON",
            observed=str(error),
            where=where,
            hint="restore the file, or make the record anew",
        ) from error
    kind = parsed.get("record") if isinstance(parsed, dict) else None
    record_type = by_kind.get(kind) if isinstance(kind, str) else None
    if record_type is None:
        raise UsageError(
            "this file is no such record", observed=kind, allowed=" or ".join(by_kind), where=where,
            hint="check the path",
        )  # fmt: skip
    try:
        record = record_type.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise EvidenceError(
            "the record does not have the form that it declares",
            observed=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=where,
            hint="it was edited, or comes from another version; make it anew",
        ) from error
    try:
        canonical = canonical_bytes(record)
    except rfc8785.CanonicalizationError:
        canonical = None  # a number or text that no record of ours can hold
    if canonical != content:
        raise EvidenceError(
            "the record is not in canonical form: it was edited after it was written",
            where=where,
            hint="restore the original file",
        )
    return record


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces. Raises ``UsageError`` where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError("cannot read the file", observed=error.strerror, where=str(path)) from error


def write_table(path: Path, columns: dict[str, list[Any]]) -> RawFile:
    """Write columns as a Parquet file beside a record, and say what it is.

    Raises:
        UsageError: there is such a file already.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    try:
        write_atomically(path, lambda stream: pq.write_table(table, stream))
    except FileExistsError:
        raise UsageError(
            "the file exists", where=str(path), hint="records are never overwritten: choose another --name"
        ) from None
    return RawFile(file=path.name, sha256=sha256_of_file(path), rows=table.num_rows)


def read_cycles_s(path: Path, calibration: Calibration, k: int | None) -> NDArray[np.float64] | None:
    """The cycles behind a calibration at batches of ``k``: columns D and S in seconds, shape ``[n, 2]``, no warm-up.

    Args:
        path: of the calibration, beside which its cycles lie.

    Returns:
        None where the calibration names no file of cycles.

    Raises:
        UsageError: the file is not there.
        EvidenceError: it is not the file that the calibration names.
    """
    if calibration.raw is None:
        return None
    import pyarrow.parquet as pq

    table = path.parent / calibration.raw.file
    if sha256_of_file(table) != calibration.raw.sha256:
        raise EvidenceError(
            "the cycles are not those of the calibration",
            where=str(table),
            hint="restore the file that was written with the calibration",
        )
    frame = pq.read_table(table).to_pandas()
    chosen = frame[(frame["k"] == k) & ~frame["warmup"].astype(bool)]
    cycles_s: NDArray[np.float64] = chosen[["transport_ns", "service_ns"]].to_numpy(dtype=float) / NS_PER_S
    return cycles_s
