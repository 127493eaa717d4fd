"""Triton's trace files as a source of moments: when each batch passed the server's stages.

Times in these files are CLOCK_MONOTONIC nanoseconds, so they compare with ours only on the same host and boot. Only
files whose name ends with an index are complete; changing the setting makes the server write out what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from b2gmodel.errors import EvidenceError, ServerError
from b2gmodel.legs import ServerMarks
from b2gmodel.live.kserve import ControlPlane

_SIZE_LIMIT_BYTES: Final = 64 * 1024 * 1024
_STAMPS: Final = ("QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


async def start_tracing(control: ControlPlane, model: str) -> None:
    """Trace every request of a model. Raises ``ServerError`` where the server does not trace."""
    await control.set_trace(
        model,
        {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "1"},
    )


async def stop_tracing(control: ControlPlane, model: str) -> None:
    """Back to the server's own setting."""
    await control.set_trace(
        model, {"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None}
    )


def read_marks(trace_file: Path, batch_ids: Iterable[str]) -> Mapping[str, ServerMarks]:
    """The marks of those batches, from the complete files ``trace_file.0``, ``trace_file.1``, and so on.

    Raises:
        EvidenceError: a batch is missing or was traced twice, or a file is damaged.
    """
    wanted = set(batch_ids)
    found: dict[str, ServerMarks] = {}
    for path in sorted(trace_file.parent.glob(f"{trace_file.name}.*")):
        if not path.suffix[1:].isdigit():
            continue
        for batch_id, stamps in _requests(path):
            if batch_id not in wanted:
                continue
            if batch_id in found:
                raise EvidenceError("the server traced a batch twice", observed=batch_id, where=str(path))
            found[batch_id] = _marks(stamps, path)
    missing = wanted - set(found)
    if missing:
        raise EvidenceError(
            "the server's trace lacks batches of ours",
            observed=f"{len(missing)} of {len(wanted)} missing, {min(missing)} for one",
            where=str(trace_file),
            hint="is this the trace file of that server, and on this host?",
        )
    return found


def _requests(path: Path) -> Iterable[tuple[str, dict[str, int]]]:
    """Request id and stamps of each trace in a file: an id's stamps are spread over several entries."""
    content = path.read_bytes()[: _SIZE_LIMIT_BYTES + 1]
    if len(content) > _SIZE_LIMIT_BYTES:
        raise EvidenceError("the trace file is too long", allowed=f"<= {_SIZE_LIMIT_BYTES} bytes", where=str(path))
    try:
        entries: list[dict[str, Any]] = json.loads(content)
        request_ids: dict[int, str] = {}
        stamps: dict[int, dict[str, int]] = {}
        for entry in entries:
            if "request_id" in entry:
                request_ids[int(entry["id"])] = str(entry["request_id"])
            for stamp in entry.get("timestamps", ()):
                stamps.setdefault(int(entry["id"]), {})[str(stamp["name"])] = int(stamp["ns"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(
            "the trace file is damaged", observed=f"{type(error).__name__}: {error}", where=str(path)
        ) from error
    return [(request_id, stamps.get(number, {})) for number, request_id in request_ids.items()]


def _marks(stamps: Mapping[str, int], path: Path) -> ServerMarks:
    absent = [name for name in _STAMPS if name not in stamps]
    if absent:
        raise ServerError("the trace lacks stamps", observed=", ".join(absent), where=str(path))
    return ServerMarks(*(stamps[name] for name in _STAMPS))
