"""A small TOML file -> a study's manifest: what is run, and in which order.

No clock and no file: the text, the table of known workloads and the placements' versions arrive as arguments. The
same text and the same seed give the same manifest. Blocks (one session of one workload over one transport) come
session by session, in random order within each; in a block each repetition runs all cells in an order of its own, so
that what drifts meets all placements alike.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from b2gmodel.errors import UsageError
from b2gmodel.records import Name
from b2gmodel.study_records import (
    Cell,
    Clients,
    EmulatedCompute,
    PlacementName,
    PlacementVersion,
    PlannedRun,
    Study,
    StudyServer,
    StudyWorkload,
)
from b2gmodel.units import KIB

Versions = Callable[[PlacementName, Clients], str]
"""The digest of a placement's code and settings."""

MOST_RUNS: Final = 100_000
_FP32_BYTES: Final = 4
_LARGEST_SEED: Final = 2**53 - 1
# What the fake server is where the file does not say: small and quick, for trying a plan's whole course.
_FAKE_KIB: Final = 1
_FAKE_S0_S, _FAKE_S1_S = 0.0001, 0.00002
_FAKE_MAX_BATCH: Final = 1024
_ENTRIES: Final = ("_dynamic", "_null")
"""What a workload's other entries on the server end in."""

Count = Annotated[int, Field(ge=1, le=65_536)]
Counts = Annotated[list[Count], Field(min_length=1, max_length=256)]
Milliseconds = Annotated[float, Field(ge=0, le=600_000, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Server(_Section):
    kind: Literal["embedded", "fake", "url"] = "embedded"
    url: str | None = None
    grpc_url: str | None = None


class _Workload(_Section):
    name: Name
    model: str | None = None
    dynamic_model: str | None = None
    null_model: str | None = None
    shapes: dict[str, Counts] = {}
    payload_kib: Count | Counts | None = None
    s0_ms: Milliseconds | None = None
    s1_ms: Milliseconds | None = None
    max_batch: Count | None = None


class _File(_Section):
    name: Name
    seed: Annotated[int, Field(ge=0, le=_LARGEST_SEED)] = 1
    server: _Server = _Server()
    clients: Clients = "inside"
    sessions: Annotated[int, Field(ge=1, le=1000)] = 3
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 1
    seconds_per_run: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 2.0
    warmup_rounds: Annotated[int, Field(ge=1, le=1000)] = 3
    transports: Annotated[list[Literal["http", "grpc", "shm"]], Field(min_length=1)] = ["http"]
    placements: Annotated[list[PlacementName], Field(min_length=1)]
    k: Counts = []
    flights: Counts = []
    concurrency: Counts
    workload: Annotated[list[_Workload], Field(min_length=1)]


def plan_study(
    text: str,
    known: Mapping[str, EmulatedCompute],
    version_of: Versions,
    *,
    where: str,
    changes: Mapping[str, Any] | None = None,
) -> Study:
    """The manifest of the study that ``text`` describes.

    Args:
        text: TOML, as in ``b2gmodel/studies``.
        known: the reference workloads by name, for those that the file only names.
        version_of: the digest of each placement's code and settings.
        where: the file's name, for errors.
        changes: top-level keys that replace the file's own.

    Raises:
        UsageError: not TOML, an unknown or unusable key, or a plan that cannot be run as it stands.
    """
    file = _read(text, dict(changes or {}), where)
    _check(file, where)
    workloads, said = _workloads(file, known, where)
    cells, left_out = _cells(file, where)
    runs = tuple(_ordered(file, workloads, cells))
    if len(runs) > MOST_RUNS:
        raise UsageError("more runs than a study may have", observed=len(runs), allowed=f"<= {MOST_RUNS}", where=where)
    return Study(
        name=file.name,
        seed=file.seed,
        server=StudyServer(kind=file.server.kind, url=file.server.url, grpc_url=file.server.grpc_url),
        clients=file.clients,
        sessions=file.sessions,
        repetitions=file.repetitions,
        seconds_per_run=float(file.seconds_per_run),
        warmup_rounds=file.warmup_rounds,
        workloads=workloads,
        placements=tuple(
            PlacementVersion(placement=each, digest=version_of(each, file.clients)) for each in file.placements
        ),
        runs=runs,
        notes=(*said, *left_out),
    )


def _read(text: str, changes: dict[str, Any], where: str) -> _File:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"not a TOML file ({error})", where=where, hint="b2g study plan quick --show prints one that works"
        ) from error
    try:
        return _File.model_validate(content | changes)
    except ValidationError as error:
        raise _unusable(error, where) from None


def _unusable(error: ValidationError, where: str) -> UsageError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        sections: dict[str, type[_Section]] = {"server": _Server, "workload": _Workload}
        section = sections.get(str(first["loc"][0]), _File) if len(first["loc"]) > 1 else _File
        return UsageError("no such key", observed=place, allowed=", ".join(section.model_fields), where=where)
    if first["type"] == "missing":
        return UsageError("a key is missing", observed=place, where=where, hint=f"add {first['loc'][-1]} = ...")
    return UsageError("not usable", observed=repr(first["input"])[:80], allowed=first["msg"], where=f"{where}: {place}")


def _check(file: _File, where: str) -> None:
    for key in ("transports", "placements", "k", "flights", "concurrency"):
        values = getattr(file, key)
        if len(set(values)) != len(values):
            raise UsageError("a value is named twice", observed=str(values), where=f"{where}: {key}")
    needed = {"C3": ("k",), "C4": ("k", "flights")}
    for placement, keys in needed.items():
        for key in keys:
            if placement in file.placements and not getattr(file, key):
                raise UsageError(f"{placement} needs {key}", where=where, hint=f"add {key} = [...]")
    if file.flights and "C4" not in file.placements:
        raise UsageError("flights are for C4 alone", observed=str(file.flights), where=f"{where}: flights")
    if 1 in file.flights:
        raise UsageError("one flight is placement C3", observed=1, allowed=">= 2", where=f"{where}: flights")
    if "D0" in file.placements and file.clients == "process":
        raise UsageError(
            "D0 has no proxy, so its clients cannot be in a process of their own",
            observed="clients = process",
            allowed="clients = inside",
            where=where,
            hint='leave D0 out, or set clients = "inside"',
        )
    _check_server(file, where)


def _check_server(file: _File, where: str) -> None:
    kind, url = file.server.kind, file.server.url
    if (kind == "url") != (url is not None):
        raise UsageError(
            "a server's address goes with kind = url",
            observed=f"kind = {kind}, url = {url}",
            where=f"{where}: server",
            hint='write kind = "url" and url = "http://HOST:PORT"',
        )
    if kind == "fake" and set(file.transports) != {"http"}:
        raise UsageError(
            "the fake server speaks HTTP alone",
            observed=", ".join(file.transports),
            allowed="http",
            where=f"{where}: transports",
        )
    if kind == "url" and "grpc" in file.transports and file.server.grpc_url is None:
        raise UsageError(
            "the server's gRPC address is not known", where=f"{where}: server", hint="add grpc_url = 'HOST:PORT'"
        )


# workloads


def _workloads(
    file: _File, known: Mapping[str, EmulatedCompute], where: str
) -> tuple[tuple[StudyWorkload, ...], tuple[str, ...]]:
    of_each = [_of_one(each, file, known, f"{where}: workload {each.name}") for each in file.workload]
    found = tuple(workload for several in of_each for workload in several)
    names = [workload.name for workload in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError("a workload is named twice", observed=name, where=where)
    stand_ins = [each.name for each in file.workload if file.server.kind == "fake" and each.s0_ms is None]
    if not stand_ins:
        return found, ()
    return found, (
        f"the fake server stands in for {', '.join(stand_ins)}: requests of {_FAKE_KIB} KiB where no payload is "
        f"given, S(k) = {_FAKE_S0_S * 1e3:g} ms + {_FAKE_S1_S * 1e3:g} ms k; nothing that is measured on it says "
        "anything of a real server",
    )


def _of_one(
    each: _Workload, file: _File, known: Mapping[str, EmulatedCompute], where: str
) -> tuple[StudyWorkload, ...]:
    if each.name.endswith(_ENTRIES):
        raise UsageError(
            "not a workload's name: it would be taken for an entry of another",
            observed=each.name,
            allowed=f"not ending in {' or '.join(_ENTRIES)}",
            where=where,
        )
    if file.server.kind == "url":
        return (_remote(each, file, where),)
    if (each.s0_ms is None) != (each.s1_ms is None):
        raise UsageError("s0_ms and s1_ms go together", where=where)
    for key in ("model", "dynamic_model", "null_model", "shapes"):
        if getattr(each, key):
            raise UsageError(f"{key} is for a server of your own", where=where, hint="that is kind = url")
    payloads = each.payload_kib if isinstance(each.payload_kib, list) else [each.payload_kib]
    several = isinstance(each.payload_kib, list)
    return tuple(
        _entry(f"{each.name}-{payload}" if several else each.name, _compute(each, payload, file, known, where))
        for payload in payloads
    )


def _compute(
    each: _Workload, payload_kib: int | None, file: _File, known: Mapping[str, EmulatedCompute], where: str
) -> EmulatedCompute:
    """What the server is told to be: the file's own figures, a reference workload's, or the fake's stand-in."""
    if each.s0_ms is not None and each.s1_ms is not None:
        if payload_kib is None:
            raise UsageError("a workload with times of its own needs a payload", where=where, hint="add payload_kib")
        times = (each.s0_ms / 1e3, each.s1_ms / 1e3)
    elif file.server.kind == "fake":
        times, payload_kib = (_FAKE_S0_S, _FAKE_S1_S), payload_kib or _FAKE_KIB
    elif each.name in known:
        if payload_kib is not None or each.max_batch is not None:
            raise UsageError("a reference workload is as the table has it", where=where, hint="add s0_ms and s1_ms")
        return known[each.name]
    else:
        raise UsageError(
            "no such reference workload, and no times of its own",
            observed=each.name,
            allowed=", ".join(known),
            where=where,
            hint="name one of these, or add payload_kib, s0_ms and s1_ms",
        )
    return EmulatedCompute(
        input_shape=(payload_kib * KIB // _FP32_BYTES,),
        datatype="FP32",
        output_shape=(4,),
        s0_s=times[0],
        s1_s=times[1],
        max_batch=each.max_batch or _FAKE_MAX_BATCH,
        instances=1,
    )


def _entry(name: str, compute: EmulatedCompute) -> StudyWorkload:
    element_bytes = {"8": 1, "16": 2, "32": 4, "64": 8}[compute.datatype.lstrip("UINTFP")]
    return StudyWorkload(
        name=name,
        model=name,
        dynamic_model=f"{name}_dynamic",
        null_model=f"{name}_null",
        payload_bytes=int(np.prod(compute.input_shape)) * element_bytes,
        emulated=compute,
    )


def _remote(each: _Workload, file: _File, where: str) -> StudyWorkload:
    for key in ("payload_kib", "s0_ms", "s1_ms", "max_batch"):
        if getattr(each, key) is not None:
            raise UsageError(f"{key} is the server's own affair", where=where, hint="leave it out with kind = url")
    if "C2" in file.placements and each.dynamic_model is None:
        raise UsageError(
            "C2 needs the model's entry with dynamic batching", where=where, hint="add dynamic_model = '...'"
        )
    return StudyWorkload(
        name=each.name,
        model=each.model or each.name,
        dynamic_model=each.dynamic_model,
        null_model=each.null_model,
        payload_bytes=None,
        shapes={name: tuple(shape) for name, shape in each.shapes.items()},
    )


# cells and their order


def _cells(file: _File, where: str) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """Every cell once, and what was left out or narrowed and why."""
    cells: dict[Cell, None] = {}
    notes: list[str] = []
    narrowed = sorted({c for c, k in product(file.concurrency, file.k) if c < k and "C3" in file.placements})
    if narrowed:
        notes.append(f"C3 with fewer clients than k gathers as many as there are: k = c at c = {_listed(narrowed)}")
    for placement, c in product(file.placements, file.concurrency):
        match placement:
            case "C3":
                chosen = [(min(k, c), 1) for k in file.k]
            case "C4":
                chosen = [(k, flights) for k, flights in product(file.k, file.flights) if k * flights <= c]
            case _:
                chosen = [(1, c)]
        for k, flights in chosen:
            cells[Cell(placement=placement, k=k, flights=flights, concurrency=c)] = None
    if "C4" in file.placements:
        most = max(file.concurrency)
        for k, flights in product(file.k, file.flights):
            if k * flights > most:
                raise UsageError(
                    "C4 with fewer clients than its flights carry: some would never fly",
                    observed=f"k = {k}, flights = {flights}, concurrency <= {most}",
                    allowed=f"a concurrency of {k * flights} or more",
                    where=where,
                )
        short = sorted({c for c, k, m in product(file.concurrency, file.k, file.flights) if k * m > c})
        if short:
            notes.append(f"C4 is left out where k M > c: at c = {_listed(short)} some or all of its cells")
    return tuple(cells), tuple(notes)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _ordered(file: _File, workloads: Sequence[StudyWorkload], cells: Sequence[Cell]) -> Iterator[PlannedRun]:
    rng = np.random.default_rng(file.seed)
    pairs = list(product((workload.name for workload in workloads), file.transports))
    for session in range(file.sessions):
        for pair in rng.permutation(len(pairs)):
            workload, transport = pairs[pair]
            for repetition in range(file.repetitions):
                for number in rng.permutation(len(cells)):
                    yield PlannedRun(
                        session=session,
                        workload=workload,
                        transport=transport,
                        cell=cells[number],
                        repetition=repetition,
                    )
