"""Files: whole or not at all, never overwritten, and a damaged one is one clear line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import builders
import pytest

from b2gmodel import store
from b2gmodel.errors import B2GError, EvidenceError, UsageError
from b2gmodel.records import Calibration, Prediction, canonical_bytes, digest_of
from b2gmodel.store import (
    check_name,
    read_record,
    sha256_of_file,
    write_atomically,
    write_record,
    write_table,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cal.json"


def test_a_record_is_read_as_it_was_written(path: Path) -> None:
    record = builders.calibration()
    assert write_record(path, record) == path
    assert path.read_bytes() == canonical_bytes(record)
    assert read_record(path, Calibration) == record
    assert sha256_of_file(path) == digest_of(record)
    assert [entry.name for entry in path.parent.iterdir()] == ["cal.json"]


def test_the_same_record_again_is_the_same_file(path: Path) -> None:
    write_record(path, builders.calibration())
    before = path.stat()
    write_record(path, builders.calibration())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_another_record_does_not_replace_it(path: Path) -> None:
    write_record(path, builders.calibration())
    content = path.read_bytes()
    with pytest.raises(UsageError, match="holds something else"):
        write_record(path, builders.calibration(name="other"))
    assert path.read_bytes() == content


def test_what_fails_half_way_leaves_nothing(path: Path) -> None:
    def fill(stream: IO[bytes]) -> None:
        stream.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(path, fill)
    assert list(path.parent.iterdir()) == []


def test_a_full_disk_is_one_line(path: Path) -> None:
    def fill(stream: IO[bytes]) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(UsageError, match="cannot write the file: saw 'No space left on device'"):
        write_atomically(path, fill)
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write the file"):
        write_record(tmp_path / "file" / "cal.json", builders.calibration())
    with pytest.raises(UsageError, match="cannot write the file"):
        write_record(Path("/proc/b2g/cal.json"), builders.calibration())


def test_killed_while_writing_leaves_no_half_file(path: Path) -> None:
    """The writer is stopped for good after its first piece is on the disk, and again after fsync."""
    for number, moment in enumerate(("fill", "link")):
        target = path.with_name(f"{number}.json")
        code = (
            "import os, sys, pathlib\n"
            "from b2gmodel import store\n"
            "def die(*_): print('here', flush=True); sys.stdin.read()\n"
            "def fill(stream):\n"
            "    stream.write(b'half'); stream.flush()\n"
            f"    {moment!r} == 'fill' and die()\n"
            f"if {moment!r} == 'link': store.os.link = die\n"
            "store.write_atomically(pathlib.Path(sys.argv[1]), fill)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"here\n"
            os.kill(writer.pid, signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        assert not target.exists()
        # The name is free: the next run writes it.
        write_record(target, builders.calibration())
        assert read_record(target, Calibration) == builders.calibration()


class TestDamage:
    """One planted defect a file; the error's type, and the words that tell it from the others."""

    def seen(self, path: Path, content: bytes) -> B2GError:
        path.write_bytes(content)
        with pytest.raises(B2GError) as seen:
            read_record(path, Calibration)
        assert seen.value.where == str(path)
        assert "\n" not in seen.value.line()
        return seen.value

    @pytest.fixture
    def facts(self) -> dict[str, Any]:
        return builders.calibration().model_dump(mode="json")

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
    def test_truncated(self, path: Path, share: float) -> None:
        content = canonical_bytes(builders.calibration())
        error = self.seen(path, content[: int(len(content) * share)])
        assert isinstance(error, EvidenceError)
        assert error.problem == "the record is damaged or truncated: it is not JSON"

    @pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"[" * 100_000])
    def test_garbage(self, path: Path, content: bytes) -> None:
        error = self.seen(path, content)
        assert isinstance(error, EvidenceError)
        assert len(error.line()) < 400

    @pytest.mark.parametrize(
        "content", [b"[]", b"7", b"null", b"{}", b'"\xed\xa0\x80"', b'{"record": "b2g.prediction"}', b'{"record": []}']
    )
    def test_another_kind(self, path: Path, content: bytes) -> None:
        error = self.seen(path, content)
        assert isinstance(error, UsageError)
        assert error.allowed == "b2g.calibration"

    def test_a_field_of_the_wrong_form_is_named(self, path: Path, facts: dict[str, Any]) -> None:
        facts["points"][0]["k"] = 0
        error = self.seen(path, json.dumps(facts).encode())
        assert isinstance(error, EvidenceError)
        assert str(error.observed).startswith("points.0.k: ")

    @pytest.mark.parametrize("indent", [None, 2])
    def test_written_by_another_hand(self, path: Path, facts: dict[str, Any], indent: int | None) -> None:
        error = self.seen(path, json.dumps(facts, indent=indent).encode())
        assert isinstance(error, EvidenceError)
        assert error.problem == "the record is not in canonical form: it was edited after it was written"

    def test_a_field_given_twice(self, path: Path) -> None:
        content = canonical_bytes(builders.calibration()).replace(b'{"clock"', b'{"clock":null,"clock"', 1)
        assert "canonical" in self.seen(path, content).problem

    @pytest.mark.parametrize("tail", [b"\n", b" ", b"\x00"])
    def test_bytes_after_the_end(self, path: Path, tail: bytes) -> None:
        assert isinstance(self.seen(path, canonical_bytes(builders.calibration()) + tail), EvidenceError)

    def test_a_number_that_canonical_json_cannot_hold(self, path: Path) -> None:
        content = canonical_bytes(builders.calibration()).replace(
            b'"payload_bytes":48', b'"payload_bytes":9007199254740993'
        )
        assert isinstance(self.seen(path, content), EvidenceError)

    def test_too_long(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store, "SIZE_LIMIT_BYTES", 100)
        assert self.seen(path, b"x" * 101).problem == "the record is too long"


def test_the_kind_is_told_for_predictions_too(path: Path) -> None:
    write_record(path, builders.calibration())
    with pytest.raises(UsageError, match="no such record: saw 'b2g.calibration'; allowed: b2g.prediction"):
        read_record(path, Prediction)


@pytest.mark.parametrize("name", ["", "missing.json", "x" * 300])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read the file"):
        read_record(tmp_path / name, Calibration)
    with pytest.raises(UsageError, match="cannot read the file"):
        sha256_of_file(tmp_path / name)


@pytest.mark.parametrize("name", ["a", "A_9.b-c", "_x", "9", "a" * 128])
def test_names(name: str) -> None:
    assert check_name(name, where="--name") == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "..", "a b", "a\n", "é", "a" * 129, "a\x00"])
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(UsageError, match="--name: this cannot be a name"):
        check_name(name, where="--name")


def test_a_table_is_described_and_never_overwritten(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "cal.parquet"
    columns: dict[str, list[Any]] = {"k": [8, 8], "first_byte_ns": [2**60 + 1, None]}
    raw = write_table(path, columns)
    assert (raw.file, raw.rows, raw.sha256) == ("cal.parquet", 2, sha256_of_file(path))
    assert pq.read_table(path).to_pydict() == columns
    with pytest.raises(UsageError, match="never overwritten"):
        write_table(path, columns)
    assert sha256_of_file(path) == raw.sha256


def test_what_is_replaced_is_there_until_the_new_is_whole(tmp_path: Path) -> None:
    """A figure's or a report's file; a record's never is."""
    path = tmp_path / "report.html"
    path.write_bytes(b"old")

    def fail(stream: IO[bytes]) -> None:
        stream.write(b"ne")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - ours
        write_atomically(path, fail, replace=True)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda stream: stream.write(b"new"), replace=True)
    assert path.read_bytes() == b"new"
    with pytest.raises(FileExistsError):
        write_atomically(path, lambda stream: stream.write(b"third"))
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
