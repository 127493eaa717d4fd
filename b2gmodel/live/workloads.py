"""The table of emulated workloads, and the fingerprint by which a client knows its own answer.

The table is data (``workloads.toml``; a user's file has the same form). No default hides in code: each entry
states every field, and its digest is part of every record made against it. No server and no clock here.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numpy as np
import rfc8785

from b2gmodel.errors import UsageError
from b2gmodel.units import s_from_ns

DATATYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("UINT8", "INT8"), 1),
    **dict.fromkeys(("UINT16", "INT16", "FP16"), 2),
    **dict.fromkeys(("UINT32", "INT32", "FP32"), 4),
    **dict.fromkeys(("UINT64", "INT64", "FP64"), 8),
}
FINGERPRINT_BYTES: Final = 16
REAL_OUTPUT_NAME: Final = "real_output"
"""The output of a real model, which carries no fingerprint."""
BUILT_IN_TABLE: Final = Path(__file__).with_name("workloads.toml")

_NS_PER_MS: Final = 1_000_000
_MAX_BATCH: Final = 1024
_MAX_INSTANCES: Final = 64
_MAX_PAYLOAD_BYTES: Final = 1 << 30
_MAX_SERVICE_MS: Final = 600_000.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Role(Enum):
    """The entries under which the server offers one workload."""

    UNBATCHED = "unbatched"
    """The server executes each batch as it was sent."""
    DYNAMIC = "dynamic"
    """The server merges waiting requests by its dynamic batcher."""
    NULL = "null"
    """The same input, nothing computed: the transport alone."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One emulated workload: what it receives, what it answers, how long it holds an instance.

    Attributes:
        name: the model name under which a server offers it.
        input_shape: dimensions of one request's input, without the batch dimension.
        datatype: element type of the input, as KServe v2 spells it.
        output_shape: dimensions of one request's FP32 result.
        s0_s, s1_s: service time of a batch of k is ``s0_s + s1_s * k`` seconds.
        max_batch: largest k that the model accepts.
        instances: model instances side by side.
    """

    name: str
    input_shape: tuple[int, ...]
    datatype: str
    output_shape: tuple[int, ...]
    s0_s: float
    s1_s: float
    max_batch: int
    instances: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of one request's input."""
        return math.prod(self.input_shape) * DATATYPE_BYTES[self.datatype]

    @property
    def result_bytes(self) -> int:
        """Bytes of one request's result."""
        return math.prod(self.output_shape) * DATATYPE_BYTES["FP32"]

    def service_time_s(self, k: int) -> float:
        """``S(k)`` in seconds for a batch of ``k`` requests, 1 <= k <= max_batch; else ``ValueError``."""
        if not 1 <= k <= self.max_batch:
            raise ValueError(f"k must be 1..{self.max_batch}, not {k!r}")
        return self.s0_s + self.s1_s * k

    def model_name(self, role: Role) -> str:
        """The server's model name for one entry: ``NAME``, ``NAME_dynamic`` or ``NAME_null``."""
        return self.name if role is Role.UNBATCHED else f"{self.name}_{role.value}"


@dataclass(frozen=True, slots=True)
class WorkloadTable:
    """Workloads by name, in the file's order."""

    workloads: tuple[Workload, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(workload.name for workload in self.workloads)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the table's content in canonical JSON: comments, layout and order do not count."""
        content = {workload.name: asdict(workload) for workload in self.workloads}
        return hashlib.sha256(rfc8785.dumps(content)).hexdigest()

    def __getitem__(self, name: str) -> Workload:
        """The workload of that name; ``UsageError`` where there is none."""
        for workload in self.workloads:
            if workload.name == name:
                return workload
        raise UsageError("no such workload", observed=name, allowed=", ".join(self.names))


def load_workloads(path: Path | None = None) -> WorkloadTable:
    """The built-in table, or a user's file of the same form.

    Raises:
        UsageError: the file cannot be read or is not TOML, or a field is missing, unknown or unusable.
    """
    source = BUILT_IN_TABLE if path is None else path
    try:
        content = tomllib.loads(source.read_bytes().decode())
    except OSError as error:
        raise UsageError(
            f"cannot read the table of workloads ({error.strerror or error})",
            observed=str(source),
            hint="name a readable TOML file, for example --compute emulated:my.toml",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"not a TOML file ({error})",
            where=str(source),
            hint=f"{BUILT_IN_TABLE.name} in the package shows the form",
        ) from error
    if not content:
        raise UsageError("the table has no workload", where=str(source), allowed="at least one [NAME] section")
    return WorkloadTable(tuple(_workload(name, entry, source) for name, entry in content.items()))


def fingerprint(payload: bytes | bytearray | memoryview) -> bytes:
    """The first 16 bytes of the emulated model's result for this payload: so a client knows its own answer.

    They are four little-endian FP32 numbers, each an exact integer of 16 bits: the low and the high half of
    the payload's first four bytes, then of the exclusive or of all its 32-bit words (all little-endian, the
    last word padded with zero bytes). A changed, missing, swapped-in or torn request shows, unless its errors
    cancel in the exclusive or; the emulated model computes the same from what it received.

    Raises:
        ValueError: an empty payload.
    """
    data = memoryview(payload).cast("B")
    if not data:
        raise ValueError("an empty payload has no fingerprint")
    whole = len(data) // 8 * 8
    mixed = int(np.bitwise_xor.reduce(np.frombuffer(data[:whole], "<u8"))) if whole else 0
    mixed ^= int.from_bytes(data[whole:], "little")
    head = int.from_bytes(data[:4], "little")
    words = (mixed ^ (mixed >> 32)) & 0xFFFF_FFFF
    return np.array([head & 0xFFFF, head >> 16, words & 0xFFFF, words >> 16], "<f4").tobytes()


def _workload(name: str, entry: object, source: Path) -> Workload:
    """One validated entry of the table."""
    where = f"{source}: [{name}]"
    reserved = tuple(f"_{role.value}" for role in Role)
    if not _NAME.fullmatch(name) or name.endswith(reserved):
        allowed = f"letters, digits, '_', '-', '.'; at most 64; not ending in {', '.join(reserved)}"
        raise UsageError("not a workload name", observed=name, allowed=allowed, where=str(source))
    fields = _Fields(entry, where)
    workload = Workload(
        name=name,
        input_shape=fields.shape("input_shape"),
        datatype=fields.choice("datatype", DATATYPE_BYTES),
        output_shape=fields.shape("output_shape"),
        s0_s=s_from_ns(fields.number("s0_ms", _MAX_SERVICE_MS) * _NS_PER_MS),
        s1_s=s_from_ns(fields.number("s1_ms", _MAX_SERVICE_MS) * _NS_PER_MS),
        max_batch=fields.count("max_batch", _MAX_BATCH),
        instances=fields.count("instances", _MAX_INSTANCES),
    )
    fields.refuse_the_rest()
    if workload.result_bytes < FINGERPRINT_BYTES:
        raise UsageError(
            "too few elements to carry a fingerprint",
            observed=list(workload.output_shape),
            allowed="4 or more",
            where=f"{where} output_shape",
        )
    for side, size in (("input_shape", workload.payload_bytes), ("output_shape", workload.result_bytes)):
        if size > _MAX_PAYLOAD_BYTES:
            raise UsageError(
                "a request too large to emulate",
                observed=size,
                allowed="1 GiB or less",
                where=f"{where} {side}",
            )
    return workload


class _Fields:
    """An entry's fields, each taken once by the kind that it must have; what is left over is a mistake."""

    def __init__(self, entry: object, where: str) -> None:
        if not isinstance(entry, dict):
            raise UsageError("not a workload", observed=entry, allowed="a [NAME] section with fields", where=where)
        self._left: dict[str, object] = dict(entry)
        self._taken: list[str] = []
        self._where = where

    def _take(self, key: str) -> object:
        self._taken.append(key)
        if key not in self._left:
            raise UsageError("a field is missing", observed=key, where=self._where, hint=f"add {key} = ...")
        return self._left.pop(key)

    def _error(self, key: str, observed: object, allowed: str) -> UsageError:
        return UsageError("not usable", observed=observed, allowed=allowed, where=f"{self._where} {key}")

    def number(self, key: str, most: float) -> float:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise self._error(key, value, f"a number of milliseconds, 0 to {most:g}")
        return float(value)

    def count(self, key: str, most: int) -> int:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self._error(key, value, f"a whole number, 1 to {most}")
        return value

    def choice(self, key: str, choices: Mapping[str, int]) -> str:
        value = self._take(key)
        if not isinstance(value, str) or value not in choices:
            raise self._error(key, value, ", ".join(choices))
        return value

    def shape(self, key: str) -> tuple[int, ...]:
        value = self._take(key)
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in value)
        ):
            raise self._error(key, value, "a list of positive whole numbers, such as [3, 224, 224]")
        return tuple(value)

    def refuse_the_rest(self) -> None:
        for key in self._left:
            raise UsageError("no such field", observed=key, allowed=", ".join(sorted(self._taken)), where=self._where)
