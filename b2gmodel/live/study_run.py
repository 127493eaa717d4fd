"""`b2g study run`: does what is missing of a study, block by block, and leaves to others what they have claimed.

A block is one start of the server: it warms up, then runs what is missing of it, in the manifest's order. A run that
fails is kept with its reason; the rest of its block goes on from a new warm-up. Each call tries each run once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from b2gmodel.errors import B2GError, EvidenceError
from b2gmodel.live.calibrate import Progress
from b2gmodel.live.latest import Latest, tell
from b2gmodel.live.noise import measure_noise
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.study_bench import StudyBench, opened_bench
from b2gmodel.live.study_commitment import frozen_prediction
from b2gmodel.live.study_server import target_of
from b2gmodel.live.study_session import begun, check_same_server
from b2gmodel.live.study_store import StudyStore, parquet_of
from b2gmodel.live.study_take import Figures, table_of, values_of
from b2gmodel.live.study_versions import check_versions
from b2gmodel.live.target import Endpoint, Target
from b2gmodel.study_records import Noise, PlannedRun, StudyFailure, StudyRun, StudySession


@dataclass(slots=True)
class Summary:
    """What one call did.

    Attributes:
        planned: runs of the study.
        complete: of them, complete when the call ended.
        done: runs that it completed.
        failed: runs that it tried in vain.
        elsewhere: blocks that another process was working on.
    """

    planned: int
    complete: int = 0
    done: int = 0
    failed: list[StudyFailure] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def run_study(folder: Path, progress: Progress) -> Summary:
    """Do what is missing of the study in ``folder``.

    Raises:
        UsageError: no study there, no room, or a server that does not serve what was planned.
        EvidenceError: the manifest or a run is damaged, or the code is not that of the manifest.
        SetupError, ServerError: the server did not start, or stopped serving for good.
    """
    store = StudyStore.open(folder)
    check_versions(store.study, where=str(folder))
    target, summary = target_of(store.study), Summary(planned=len(store.study.runs))
    frozen = frozen_prediction(folder)
    prediction_digest = None if frozen is None else frozen.digest
    for block, runs in store.study.blocks.items():
        marks = store.marks()
        summary.complete = len(marks)
        # Asked without a claim first: a block that is complete needs none, and stays so.
        if all(run.run_id in marks for run in runs):
            continue
        with store.claimed(block) as ours:
            if not ours:
                summary.elsewhere.append(block)
                continue
            store.tidy(runs)
            marks = store.marks()
            missing = [run for run in runs if run.run_id not in marks]
            if missing:
                _Block(store, target, missing, summary, progress, prediction_digest).work()
    summary.complete = len(store.marks())
    return summary


@dataclass(slots=True)
class _Block:
    store: StudyStore
    target: Target
    missing: Sequence[PlannedRun]
    summary: Summary
    progress: Progress
    prediction_digest: str | None
    runs: int = 0
    runs_s: float = 0.0

    @property
    def commitment(self) -> str:
        """What request ids begin with: the frozen prediction's digest, or the study's where nothing was predicted."""
        return self.prediction_digest or self.store.digest

    def work(self) -> None:
        """One session: server, proxy and load afresh, and all that is missing of the block."""
        begin_ns, noise = _boottime_ns(), measure_noise()
        workload = self.store.study.workload(self.missing[0].workload)
        self.progress(f"{self.missing[0].block}: start", self._share())
        with self.target.session((workload.model,)) as endpoint:
            session = run_loop(self._session(endpoint, begin_ns, noise))
        ended = {"end_boottime_ns": str(_boottime_ns()), "noise_after": measure_noise()}
        self.store.put_session(session.model_copy(update={**ended, "runs": self.runs, "runs_s": self.runs_s}))

    async def _session(self, endpoint: Endpoint, begin_ns: int, noise: Noise) -> StudySession:
        session: StudySession | None = None
        waiting = deque(self.missing)
        while waiting:
            async with opened_bench(self.store.study, tuple(waiting), endpoint, self.commitment[:16]) as bench:
                if session is None:
                    session = await begun(
                        self.store,
                        waiting[0],
                        endpoint,
                        bench,
                        begin_ns=begin_ns,
                        noise=noise,
                        restarted=self.target.restarts,
                        prediction_digest=self.prediction_digest,
                    )
                    check_same_server(self.store, session)
                    self.store.put_session(session)
                while waiting:
                    if not await self._one(bench, session.session_id, waiting.popleft()):
                        await bench.settle()
                        break
        assert session is not None, "a block is worked on because something is missing of it"
        return session

    async def _one(self, bench: StudyBench, session_id: str, run: PlannedRun) -> bool:
        """One run, kept whatever becomes of it; whether it was complete."""
        self.progress(run.run_id, self._share())
        begin_ns = _boottime_ns()
        try:
            figures = await bench.take(run.cell, run.run_id)
            # Whatever the figures cannot be (a rate of 0, no service time) is the run's failure, too.
            record, flights = self._record(bench, session_id, run, figures, begin_ns)
        except B2GError as error:
            self._keep_failure(session_id, run, begin_ns, error)
            return False
        self.store.keep(record, flights)
        tell(Latest(figures.stopped - figures.settled, record.flights, record.throughput_per_s))
        self.summary.done += 1
        self.runs, self.runs_s = self.runs + 1, self.runs_s + record.elapsed_s
        return True

    def _record(
        self, bench: StudyBench, session_id: str, run: PlannedRun, figures: Figures, begin_ns: int
    ) -> tuple[StudyRun, bytes]:
        study, cell = self.store.study, run.cell
        flights, raw = parquet_of(table_of(figures))
        version = next(each.digest for each in study.placements if each.placement == cell.placement)
        values: dict[str, Any] = dict(
            study_digest=self.store.digest,
            run_id=run.run_id,
            session_id=session_id,
            placement_digest=version,
            workload=run.workload,
            model=bench.model(cell).name,
            payload_bytes=bench.model(cell).payload_bytes,
            transport=run.transport,
            clients=study.clients,
            placement=cell.placement,
            k=cell.k,
            flights=cell.flights,
            concurrency=cell.concurrency,
            session=run.session,
            repetition=run.repetition,
            begin_boottime_ns=str(begin_ns),
            raw=raw,
            **values_of(figures, cell),
        )
        try:
            return StudyRun.model_validate(values), flights
        except ValidationError as error:
            first = error.errors()[0]
            raise EvidenceError(
                f"the run's {'.'.join(map(str, first['loc']))} is no figure",
                observed=str(first["input"])[:80],
                allowed=first["msg"],
                where=run.run_id,
                hint="plan more seconds_per_run; does the server keep batch statistics?",
            ) from None

    def _keep_failure(self, session_id: str, run: PlannedRun, begin_ns: int, error: B2GError) -> None:
        failure = StudyFailure(
            study_digest=self.store.digest,
            run_id=run.run_id,
            session_id=session_id,
            begin_boottime_ns=str(begin_ns),
            kind=type(error).__name__,
            error=error.line()[:4096],
        )
        self.store.keep_failure(failure)
        self.summary.failed.append(failure)

    def _share(self) -> float:
        return (self.summary.complete + self.runs) / self.summary.planned


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
