"""A study's folder: its manifest, claims, bundles, and which runs are complete.

Rules that hold here:

* A run is written beside, fsynced and renamed, then marked complete by the creation of one empty file, whose name
  holds the run's digest: there is nothing in a mark that could be torn.
* Blocks are claimed by a lock on a file, which the kernel gives back when the process ends, however it ends. Only the
  holder of a block's claim writes, adopts or removes anything of that block.
* What is found is believed only if its digest says so.

The folder::

    study.json                     the manifest
    claims/BLOCK.lock              held while a process works on the block
    runs/RUN/run.json              one run, and beside it flights.parquet
    complete/RUN.DIGEST            its mark; DIGEST is the SHA-256 of run.json
    failed/RUN-N/run.json          the N-th failure of a run
    sessions/BLOCK-N.json          the N-th session of a block
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.live.point import Table
from b2gmodel.records import RawFile, canonical_bytes
from b2gmodel.store import parse_record, read_bytes, read_record, sha256_of_file, sync_folder, write_record
from b2gmodel.study_records import PlannedRun, Study, StudyFailure, StudyRun, StudySession

MANIFEST: Final = "study.json"
RECORD: Final = "run.json"
FLIGHTS: Final = "flights.parquet"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class StudyStore:
    """A study's folder, opened."""

    folder: Path
    study: Study
    digest: str
    planned: frozenset[str]
    """The ids of all runs of the manifest."""

    @classmethod
    def create(cls, folder: Path, study: Study) -> StudyStore:
        """Write the manifest; the same again is the same study.

        Raises:
            UsageError: the folder holds another study, or cannot be written.
        """
        path = folder / MANIFEST
        if path.exists() and path.read_bytes() != canonical_bytes(study):
            raise UsageError(
                "the folder holds another study",
                where=str(path),
                hint="studies are never overwritten: choose another --out, or move the folder away yourself",
            )
        with room_in(folder):
            write_record(path, study)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> StudyStore:
        """Raises ``UsageError`` where there is no study, ``EvidenceError`` where its manifest is damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UsageError("no study there", where=str(path), hint=f"b2g study plan quick --out {folder}")
        content = read_bytes(path)
        study = parse_record(content, Study, where=str(path))
        planned = frozenset(run.run_id for run in study.runs)
        return cls(folder, study, hashlib.sha256(content).hexdigest(), planned)

    # what is there

    def marks(self) -> dict[str, str]:
        """The digest of each complete run, by its id.

        Raises:
            EvidenceError: a mark of a run that is not in the manifest, or two marks of one.
        """
        found: dict[str, str] = {}
        for name in _names(self.folder / "complete"):
            run_id, _, digest = name.rpartition(".")
            if run_id not in self.planned or run_id in found:
                raise EvidenceError(
                    "a mark of no run of this study, or a second one",
                    observed=name,
                    where=str(self.folder / "complete"),
                    hint="marks are made by b2g study run alone: remove what was put there",
                )
            found[run_id] = digest
        return found

    def failures(self) -> tuple[StudyFailure, ...]:
        """All that failed, in order of time."""
        folder = self.folder / "failed"
        found = [
            read_record(folder / name / RECORD, StudyFailure) for name in _names(folder) if not name.startswith(".")
        ]
        return tuple(sorted(found, key=lambda each: int(each.begin_boottime_ns)))

    def sessions(self, block: str | None = None) -> tuple[StudySession, ...]:
        """The sessions of a block, of all blocks where None, in order of time."""
        folder = self.folder / "sessions"
        names = [name for name in _names(folder) if name.endswith(".json") and not name.startswith(".")]
        found = [read_record(folder / name, StudySession) for name in names if block in (None, _block_of(name))]
        return tuple(sorted(found, key=lambda each: int(each.begin_boottime_ns)))

    def run(self, run_id: str, digest: str) -> StudyRun:
        """A complete run, its flights checked, too.

        Raises:
            EvidenceError: it is not the run that was marked, not of this study, or its flights are not those it names.
        """
        folder = self.folder / "runs" / run_id
        content = read_bytes(folder / RECORD)
        run = parse_record(content, StudyRun, where=str(folder / RECORD))
        if hashlib.sha256(content).hexdigest() != digest or (run.run_id, run.study_digest) != (run_id, self.digest):
            raise EvidenceError(
                "the run is not the one that was marked complete",
                where=str(folder / RECORD),
                hint="restore the file; to run it again, remove the run's folder and its mark in complete/",
            )
        if sha256_of_file(folder / run.raw.file) != run.raw.sha256:
            raise EvidenceError(
                "the run's flights are not those that it names",
                where=str(folder / run.raw.file),
                hint="restore the file; to run it again, remove the run's folder and its mark in complete/",
            )
        return run

    # the holder of a block's claim

    @contextmanager
    def claimed(self, block: str) -> Iterator[bool]:
        """Whether the block is ours for as long as this lasts; False where another process has it."""
        with room_in(self.folder):
            (self.folder / "claims").mkdir(exist_ok=True)
            lock = os.open(self.folder / "claims" / f"{block}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def tidy(self, runs: Sequence[PlannedRun]) -> None:
        """Remove what a process that died left half-written of these runs, and mark what it had written whole."""
        marked, ids = self.marks(), {run.run_id for run in runs}
        for folder in (self.folder / "runs", self.folder / "failed"):
            for name in _names(folder):
                if name.startswith(".") and _part_of(name) in ids:
                    shutil.rmtree(folder / name)
        blocks = {run.block for run in runs}
        for name in _names(self.folder / "sessions"):
            if name.startswith(".") and _block_of(_part_of(name)) in blocks:
                (self.folder / "sessions" / name).unlink()
        for name in _names(self.folder / "runs"):
            if name in ids and name not in marked:
                self._mark(name, self._whole(name))

    def keep(self, run: StudyRun, flights: bytes) -> None:
        """A run is complete: its bundle, then its mark. Raises ``UsageError`` where there is no room."""
        content = canonical_bytes(run)
        with room_in(self.folder):
            self._write_bundle("runs", run.run_id, {FLIGHTS: flights, RECORD: content})
        self._mark(run.run_id, hashlib.sha256(content).hexdigest())

    def keep_failure(self, failure: StudyFailure) -> None:
        """A run has failed: its bundle says why."""
        folder = self.folder / "failed"
        number = sum(name.rpartition("-")[0] == failure.run_id for name in _names(folder)) + 1
        with room_in(self.folder):
            self._write_bundle("failed", failure.run_id, {RECORD: canonical_bytes(failure)}, f"-{number}")

    def next_session_id(self, block: str) -> str:
        """The name of the block's next session."""
        return f"{block}-{len(self.sessions(block)) + 1}"

    def put_session(self, session: StudySession) -> None:
        """Write a session, in place of what it was at its begin."""
        folder = self.folder / "sessions"
        with room_in(self.folder):
            folder.mkdir(exist_ok=True)
            beside = folder / f".{session.session_id}.part-{os.getpid()}"
            try:
                _write_synced(beside, canonical_bytes(session))
                beside.replace(folder / f"{session.session_id}.json")
            finally:
                beside.unlink(missing_ok=True)
            sync_folder(folder)

    def _write_bundle(self, where: str, run_id: str, files: dict[str, bytes], suffix: str = "") -> None:
        parent = self.folder / where
        parent.mkdir(exist_ok=True)
        beside = parent / f".{run_id}.part-{os.getpid()}"
        try:
            beside.mkdir()
            for name, content in files.items():
                _write_synced(beside / name, content)
            sync_folder(beside)
            beside.rename(parent / f"{run_id}{suffix}")
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_folder(parent)

    def _mark(self, run_id: str, digest: str) -> None:
        folder = self.folder / "complete"
        with room_in(self.folder):
            folder.mkdir(exist_ok=True)
            os.close(os.open(folder / f"{run_id}.{digest}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            sync_folder(folder)

    def _whole(self, run_id: str) -> str:
        """The digest of a bundle that was written and not marked. Raises ``EvidenceError`` where it is not whole."""
        digest = sha256_of_file(self.folder / "runs" / run_id / RECORD)
        self.run(run_id, digest)
        return digest


def load_runs(folder: Path) -> tuple[StudyRun, ...]:
    """All complete runs of a study, each as it was marked, in the manifest's order.

    Raises:
        UsageError: no study there.
        EvidenceError: a run, its mark or the manifest is damaged or foreign.
    """
    store = StudyStore.open(folder)
    marks = store.marks()
    return tuple(store.run(run.run_id, marks[run.run_id]) for run in store.study.runs if run.run_id in marks)


def parquet_of(columns: Table) -> tuple[bytes, RawFile]:
    """Columns as a Parquet file, and what a record says of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, stream = pa.table(columns), io.BytesIO()
    pq.write_table(table, stream)
    content = stream.getvalue()
    return content, RawFile(file=FLIGHTS, sha256=hashlib.sha256(content).hexdigest(), rows=table.num_rows)


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """An error of the file system becomes one clear line. Raises ``UsageError``."""
    try:
        yield
    except OSError as error:
        free = _free_bytes(folder)
        if error.errno in _NO_ROOM:
            raise UsageError(
                "no room for the study's files",
                observed=f"{free} bytes free",
                where=str(folder),
                hint="make room and give the same command again: what is complete is kept, nothing is half-written",
            ) from error
        raise UsageError("cannot write the study's files", observed=str(error), where=str(folder)) from error


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _part_of(name: str) -> str:
    """What ``.NAME.part-PID`` is a part of."""
    return name.removeprefix(".").rpartition(".part-")[0]


def _block_of(session: str) -> str:
    """The block of ``BLOCK-N`` or ``BLOCK-N.json``."""
    return session.removesuffix(".json").rpartition("-")[0]


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
