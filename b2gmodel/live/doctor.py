"""What this machine can and cannot do, as a list of checks. Nothing is printed or changed here.

A check says what was seen; where something is amiss it says what to do. What only some uses need is
``OPTIONAL`` where absent, not ``MISSING``: emulated compute needs no GPU.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from b2gmodel.errors import B2GError
from b2gmodel.live.server import EmbeddedServer, find_installation, python_version, shared_python_folder
from b2gmodel.live.server_guard import SHARED_MEMORY, free_ports
from b2gmodel.live.workloads import load_workloads
from b2gmodel.units import format_duration

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
# Sixteen batches of eight of the largest reference payload, in the stubs' regions and in a client's own.
_SHARED_MEMORY_BYTES: Final = 1 * _GIB
_MEMORY_BYTES: Final = 2 * _GIB
_CORES: Final = 2
_PYTHON: Final = (3, 11)
_GLIBC: Final = (2, 35)
_GLIBC_PERF_ANALYZER: Final = (2, 38)


class State(Enum):
    """How a check came out."""

    OK = "ok"
    MISSING = "missing"
    OPTIONAL = "absent, optional"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what was looked at, two or three words.
        state: how it came out.
        observed: what was seen.
        todo: what to do about it; None where there is nothing to do.
    """

    name: str
    state: State
    observed: str
    todo: str | None = None

    @property
    def ok(self) -> bool:
        """False only where something needed is missing."""
        return self.state is not State.MISSING


def run_checks(start_server: bool) -> list[Check]:
    """All checks, in the order in which to mend.

    Args:
        start_server: whether to start the embedded server for a moment, too (about a second).
    """
    checks: list[Callable[[], Check]] = [
        _python, _glibc, _wheel, _libpython, _ports, _shared_memory, _memory, _cores, _governor, _gpu
    ]  # fmt: skip
    if start_server:
        checks.append(_server)
    return [check() for check in checks]


def _python() -> Check:
    seen = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info < _PYTHON:
        return Check("Python", State.MISSING, seen, "install Python 3.11 or newer")
    return Check("Python", State.OK, seen)


def _glibc() -> Check:
    name, release = platform.libc_ver()
    seen = f"{name or 'unknown'} {release}".strip()
    try:
        number = tuple(int(part) for part in release.split(".")[:2])
    except ValueError:
        number = ()
    if name != "glibc" or number < _GLIBC:
        return Check("glibc", State.MISSING, seen, "the server's wheel needs glibc 2.35 or newer")
    if number < _GLIBC_PERF_ANALYZER:
        todo = "perf_analyzer needs glibc 2.38; nothing else does"
        return Check("glibc", State.OPTIONAL, f"{seen}, too old for perf_analyzer", todo)
    return Check("glibc", State.OK, seen)


def _wheel() -> Check:
    try:
        parts = find_installation()
        wheel = version("nvidia-pytriton")
    except B2GError as error:
        return Check("server wheel", State.MISSING, error.problem, error.hint)
    except PackageNotFoundError:
        return Check("server wheel", State.OK, f"{parts.binary}, of unknown version")
    return Check("server wheel", State.OK, f"nvidia-pytriton {wheel} with a stub for Python {python_version()}")


def _libpython() -> Check:
    library = f"libpython{python_version()}.so.1.0"
    folder = shared_python_folder()
    if folder is not None:
        return Check("shared libpython", State.OK, str(folder / library))
    listing = _output("/sbin/ldconfig", "-p") or _output("ldconfig", "-p") or ""
    if library in listing:
        return Check("shared libpython", State.OK, f"the system's {library}")
    todo = f"install it, for example: apt install libpython{python_version()}"
    return Check("shared libpython", State.MISSING, f"no {library}", todo)


def _ports() -> Check:
    try:
        ports = free_ports()
    except OSError as error:
        return Check("loopback ports", State.MISSING, str(error), "allow programs to listen on 127.0.0.1")
    return Check("loopback ports", State.OK, f"free ones to be had, such as {min(ports.values())}")


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
        writable = os.access(SHARED_MEMORY, os.W_OK)
    except OSError as error:
        return Check("shared memory", State.MISSING, str(error), f"mount a tmpfs on {SHARED_MEMORY}")
    seen = f"{free // _MIB:,} MiB free in {SHARED_MEMORY}"
    if not writable:
        return Check("shared memory", State.MISSING, f"{SHARED_MEMORY} is not writable", "make it writable")
    if free < _SHARED_MEMORY_BYTES:
        todo = f"free or enlarge it to {_SHARED_MEMORY_BYTES // _MIB:,} MiB (containers: --shm-size=2g)"
        return Check("shared memory", State.MISSING, seen, todo)
    return Check("shared memory", State.OK, seen)


def _memory() -> Check:
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            seen = f"{available // _MIB:,} MiB available"
            if available < _MEMORY_BYTES:
                return Check("memory", State.MISSING, seen, f"free {_MEMORY_BYTES // _MIB:,} MiB")
            return Check("memory", State.OK, seen)
    return Check("memory", State.OPTIONAL, "the system does not tell", None)


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0))
    seen = f"{usable} usable of {os.cpu_count()}"
    if usable < _CORES:
        return Check("cores", State.MISSING, seen, "server, proxy and load share one core: use 2 or more")
    return Check("cores", State.OK, seen)


def _governor() -> Check:
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    governor = (_text(path) or "").strip()
    if not governor:
        return Check("clock governor", State.OPTIONAL, "not visible here", None)
    if governor != "performance":
        todo = "for steadier times: cpupower frequency-set -g performance"
        return Check("clock governor", State.OPTIONAL, governor, todo)
    return Check("clock governor", State.OK, governor)


def _gpu() -> Check:
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    found = [line for line in (_output("nvidia-smi", *query) or "").splitlines() if line.strip()]
    if not found:
        todo = "emulated compute needs none; for real compute on a GPU install its driver"
        return Check("GPU", State.OPTIONAL, "nvidia-smi shows none", todo)
    return Check("GPU", State.OK, "; ".join(found))


def _server() -> Check:
    began_s = time.monotonic()
    try:
        table = load_workloads()
        with EmbeddedServer.start(table, table.names[:1]) as server:
            ready_s = time.monotonic()
    except B2GError as error:
        return Check("server start", State.MISSING, error.line(), error.hint)
    took = f"{format_duration(ready_s - began_s)}, stopped in {format_duration(time.monotonic() - ready_s)}"
    return Check("server start", State.OK, f"Triton {server.version} ready in {took}")


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _output(*command: str) -> str | None:
    """What a program printed; None where it is not there, failed or hung."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
