"""A study killed at random moments and resumed, against the same study uninterrupted: no run lost, none done twice.

The published shape (3,960 runs) on the fake server, once without interruption and once with `b2g study run` killed by
SIGKILL at random moments, each time resumed. Compared afterwards: every run of the plan is complete, once; no claim,
part or process is left; and the table of the runs is the same apart from times: its cells, versions and models, the
payload of a request, the sizes of the batches in the window, as the proxy sent them and as the server executed them,
failures, and the requests sent against those answered. How many requests a run has depends on how fast it was.

    python benchmarks/study_killed.py [--kills 50] [--sessions 10] [--repetitions 3] [--seconds 10ms] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from b2gmodel.live.study_store import StudyStore, load_runs
from b2gmodel.study_records import StudyRun

COLUMNS = (
    "run_id", "placement_digest", "workload", "model", "payload_bytes", "transport", "clients", "placement", "k",
    "flights", "concurrency", "session", "repetition", "failed",
)  # fmt: skip


def b2g(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "b2gmodel", "study", *arguments]


def row(run: StudyRun) -> tuple[object, ...]:
    """What must be the same in both studies."""
    return (
        *(getattr(run, column) for column in COLUMNS),
        tuple(run.batch_sizes),
        tuple(run.server_batch_sizes),
        run.sent - run.answered,
    )


def run_whole(folder: Path) -> float:
    begin_s = time.monotonic()
    subprocess.run(b2g("run", str(folder), "-q"), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin_s


@dataclass(slots=True)
class Watched:
    """What became of the study's marks from kill to kill."""

    seen: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)

    def look(self, marks: dict[str, str]) -> None:
        """A run's digest holds when it began: done again, it would have another."""
        self.lost |= set(self.seen) - set(marks)
        self.twice |= {run_id for run_id, digest in self.seen.items() if marks.get(run_id, digest) != digest}
        self.seen = marks


def run_killed(folder: Path, kills: int, whole_s: float, moments: random.Random) -> Watched:
    """Run and kill, each time on what is left, then run to the end."""
    watched = Watched()
    for kill in range(kills):
        store = StudyStore.open(folder)
        # The work that is left, shared by the kills that are left: so that all of them hit it.
        left_s = whole_s * (1 - len(watched.seen) / len(store.planned)) / (kills - kill + 1)
        after_s = moments.uniform(0.0, 2.0) * left_s + moments.uniform(0.0, 3.0)
        process = subprocess.Popen(b2g("run", str(folder), "-q"), stdout=subprocess.DEVNULL)
        ended = True
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            ended = False
            process.send_signal(signal.SIGKILL)
            process.wait()
        watched.look(store.marks())
        how = "it had ended" if ended else "killed"
        print(f"  {kill + 1}/{kills}: {how} after {after_s:.1f} s, {len(watched.seen)} complete", flush=True)
    run_whole(folder)
    watched.look(StudyStore.open(folder).marks())
    return watched


def leftovers(folder: Path) -> list[str]:
    """Parts, and bundles without a mark."""
    bundles, marked = os.listdir(folder / "runs"), StudyStore.open(folder).marks()
    return [*map(str, folder.rglob(".*")), *(set(bundles) - set(marked))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--sessions", default="10")
    parser.add_argument("--repetitions", default="3")
    parser.add_argument("--seconds", default="10ms")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="b2g-study-") as scratch:
        whole, killed = Path(scratch) / "whole", Path(scratch) / "killed"
        for folder in (whole, killed):
            shape = ("--sessions", options.sessions, "--repetitions", options.repetitions, "--seconds", options.seconds)
            plan = b2g("plan", "published", "--server", "fake", "--out", str(folder), *shape)
            subprocess.run(plan, check=True, stdout=subprocess.DEVNULL)
        planned = len(StudyStore.open(whole).planned)
        whole_s = run_whole(whole)
        print(f"uninterrupted: {planned} runs in {whole_s:.0f} s, {planned / whole_s:.1f} a second", flush=True)
        begin_s = time.monotonic()
        watched = run_killed(killed, options.kills, whole_s, random.Random(options.seed))
        print(f"killed {options.kills} times: {time.monotonic() - begin_s:.0f} s in all")
        tables = [[row(run) for run in load_runs(folder)] for folder in (whole, killed)]
        lost = len(watched.lost) + planned - len(tables[1])
        differing = planned if lost else sum(a != b for a, b in zip(*tables, strict=True))
        left, sessions = leftovers(killed), len(StudyStore.open(killed).sessions())
    print(f"lost {lost}, done twice {len(watched.twice)}, rows that differ {differing}, left over {left or 'nothing'}")
    print(f"sessions begun {sessions}")
    wrong = lost + len(watched.twice) + differing + len(left)
    print(json.dumps({"name": "study_killed", "value": wrong, "bar": 0, "held": wrong == 0, "spread": None}))
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
