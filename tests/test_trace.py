"""Triton's trace files: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from b2gmodel.errors import EvidenceError, ServerError
from b2gmodel.legs import ServerMarks
from b2gmodel.live.trace import read_marks

NAMES = ["QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


def entries(number: int, request_id: str, first_ns: int, names: list[str] = NAMES) -> list[dict[str, Any]]:
    stamps = [{"id": number, "timestamps": [{"name": name, "ns": first_ns + i}]} for i, name in enumerate(names)]
    return [stamps[0], {"id": number, "model_name": "m", "request_id": request_id}, *stamps[1:]]


def write(folder: Path, index: str, *traced: list[dict[str, Any]]) -> Path:
    (folder / f"trace.{index}").write_text(json.dumps([entry for each in traced for entry in each]))
    return folder / "trace"


def test_stamps_spread_over_entries_and_files(tmp_path: Path) -> None:
    write(tmp_path, "0", entries(1, "a", 100), entries(2, "not ours", 200))
    trace = write(tmp_path, "1", entries(3, "b", 300))
    assert read_marks(trace, ["a", "b"]) == {
        "a": ServerMarks(100, 101, 102, 103, 104),
        "b": ServerMarks(300, 301, 302, 303, 304),
    }


def test_only_indexed_files_are_complete(tmp_path: Path) -> None:
    trace = write(tmp_path, "part", entries(1, "a", 100))
    with pytest.raises(EvidenceError, match="lacks batches of ours: saw '1 of 1 missing"):
        read_marks(trace, ["a"])


def test_a_batch_traced_twice(tmp_path: Path) -> None:
    trace = write(tmp_path, "0", entries(1, "a", 100), entries(2, "a", 200))
    with pytest.raises(EvidenceError, match="traced a batch twice"):
        read_marks(trace, ["a"])


def test_a_stamp_is_missing(tmp_path: Path) -> None:
    trace = write(tmp_path, "0", entries(1, "a", 100, NAMES[:-1]))
    with pytest.raises(ServerError, match="the trace lacks stamps: saw 'COMPUTE_END'"):
        read_marks(trace, ["a"])


@pytest.mark.parametrize("content", ["", "[", "7", '[{"id": "x", "request_id": "a"}]', "[7]"])
def test_a_damaged_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "trace.0").write_text(content)
    with pytest.raises(EvidenceError, match="the trace file is damaged"):
        read_marks(tmp_path / "trace", ["a"])
