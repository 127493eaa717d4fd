"""A study on a small tmpfs that fills up: it must stop with one clear line, lose nothing, and resume with room made.

Mounts the tmpfs in a mount namespace of its own (`unshare -m`, as root, or with user namespaces): nothing of it is
seen outside. Filled by a file of ballast, which is then removed in steps, so that the disk fills at several moments.

    python benchmarks/study_full_disk.py [--size 8m] [--steps 6]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from b2gmodel.live.study_store import StudyStore, load_runs

INSIDE = "B2G_STUDY_DISK"
PLAN = ("published", "--server", "fake", "--seconds", "5ms", "--sessions", "1", "--repetitions", "1")


def b2g(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "b2gmodel", "study", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fill(folder: Path, leave_bytes: int) -> None:
    """Ballast until that much is free."""
    disk = os.statvfs(folder)
    with (folder / "ballast").open("ab") as ballast:
        ballast.write(bytes(max(0, disk.f_bavail * disk.f_frsize - leave_bytes)))


def try_disk(disk: Path, steps: int) -> int:
    """Run on the disk that fills, ``steps`` times with a little more room, then with all of it."""
    study, faults = disk / "study", 0
    planned = b2g("plan", *PLAN, "--out", str(study))
    assert planned.returncode == 0, planned.stderr
    total, complete = len(StudyStore.open(study).planned), 0
    for step in range(steps):
        fill(disk, leave_bytes=(20 + 40 * step) * 1024)
        done = b2g("run", str(study), "-q")
        (disk / "ballast").unlink()
        marks, lines = len(StudyStore.open(study).marks()), done.stderr.splitlines()
        parts = [str(path) for path in study.rglob(".*")]
        clear = len(lines) == 1 and "no room" in lines[0] and done.returncode == 2
        whole = marks >= complete and len(load_runs(study)) == marks
        # The last step may leave room enough for all that is missing.
        faults += not (whole and not parts and (clear or marks == total))
        print(f"step {step + 1}: exit {done.returncode}, {marks} of {total} complete, parts left {len(parts)}")
        print(f"  {lines[0] if lines else done.stdout.splitlines()[0]}")
        complete = marks
    done = b2g("run", str(study), "-q")
    resumed = done.returncode == 0 and len(load_runs(study)) == total
    print(f"with room: exit {done.returncode}, {len(load_runs(study))} of {total} complete")
    faults += not resumed
    print(json.dumps({"name": "study_full_disk", "value": faults, "bar": 0, "held": faults == 0, "spread": None}))
    return 0 if faults == 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8m", help="of the tmpfs")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    mounted = os.environ.get(INSIDE)
    if mounted is not None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={options.size}", "tmpfs", mounted], check=True)
        return try_disk(Path(mounted), options.steps)
    with tempfile.TemporaryDirectory(prefix="b2g-disk-") as folder:
        own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
        inside = subprocess.run([*own, sys.executable, *sys.argv], env={**os.environ, INSIDE: folder}, check=False)
    return inside.returncode


if __name__ == "__main__":
    sys.exit(main())
