"""Processor time of processes on this host, by their own clocks, and which process serves a port.

Nothing here can fail a measurement: what the system does not tell, or forbids, is None.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_LISTENING: Final = "0A"
_PROCESS_CLOCK: Final = 2  # CPUCLOCK_SCHED of a whole process: all its threads, those that have ended too


def cpu_time_ns(pid: int) -> int | None:
    """Processor time that the process has used, all its threads together; None where there is no such process."""
    try:
        return time.clock_gettime_ns(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return None


def process_tree(root: int) -> tuple[int, ...]:
    """The process and all its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # The name, in parentheses, may hold spaces and parentheses of its own.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return tuple(found)


def listening_process(port: int) -> int | None:
    """The process that listens on a local TCP port; None where there is none, or it may not be seen."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return None
    for folder in _PROC.glob("[0-9]*"):
        try:
            if any(_target(entry) in inodes for entry in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:
            continue
    return None


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed meanwhile
