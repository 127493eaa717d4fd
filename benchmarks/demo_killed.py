"""``b2g demo`` killed with SIGKILL at random moments: nothing of it is left, and the next run starts.

    python benchmarks/demo_killed.py [--kills 5] [--longest 40] [--seed 1]

After each kill: no process that inherited the demo's environment, no listening port of theirs, no shared memory or
temporary folder. Held where that is so after every kill, and a run after the last one gets to its first measurement.
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
from pathlib import Path

GONE_WITHIN_S = 10.0
MARKER = "B2G_DEMO_KILLED"


def processes(mark: str) -> dict[int, list[str]]:
    """Command lines of the processes that inherited the mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
    return found


def listening() -> set[int]:
    """Ports with a listener on this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[1].split(":")[1], 16) for line in lines if line.split()[3] == "0A"}


def start(mark: str, scratch: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "b2gmodel", "demo", "--out", str(scratch / "demo")],
        env={**os.environ, MARKER: mark, "TMPDIR": str(scratch / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--longest", type=float, default=40.0, help="latest moment of a kill, seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    moments, clean = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="b2g-killed-") as folder:
        scratch = Path(folder)
        (scratch / "tmp").mkdir()
        for kill in range(options.kills):
            mark, after_s, before = f"{os.getpid()}.{kill}", moments.uniform(0.5, options.longest), listening()
            demo = start(mark, scratch)
            time.sleep(after_s)
            words = [word for command in processes(mark).values() for word in command]
            ids = tuple(word.removeprefix("--id=") for word in words if word.startswith("--id="))
            ports = {int(word.split("=")[1]) for word in words if "-port=" in word}
            demo.send_signal(signal.SIGKILL)
            demo.wait()
            deadline_s = time.monotonic() + GONE_WITHIN_S
            while processes(mark) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            left = {
                "processes": list(processes(mark)),
                "ports": sorted((listening() - before) & ports),
                "shared memory": [name for name in os.listdir("/dev/shm") if ids and name.startswith(ids)],
                "folders": [path.name for path in (scratch / "tmp").iterdir()],
            }
            clean += not any(left.values())
            print(
                f"killed after {after_s:5.1f} s, servers {len(ids)}: {left if any(left.values()) else 'nothing left'}"
            )
        again = start("again", scratch)
        assert again.stderr is not None
        resumed = any("measure" in line for line in again.stderr)
        again.send_signal(signal.SIGINT)
        again.wait()
    held = clean == options.kills and resumed
    print(f"the next run {'measures' if resumed else 'does not get to its measurement'}")
    print(json.dumps({"name": "demo_killed", "value": clean, "bar": options.kills, "held": held, "spread": None}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
