"""What this machine and this software are, for the records."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import b2gmodel
from b2gmodel.ledger import boot_id
from b2gmodel.ledger_environment import environment_digest
from b2gmodel.records import Clock, Host, Software

_RECORDED_PACKAGES: Final = ("h11", "numpy", "nvidia-pytriton", "pydantic", "scipy", "uvloop")


def describe_host() -> Host:
    """Machine, processor, memory, governor and GPU; None where the system does not tell."""
    return Host(
        machine=platform.machine(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        governor=_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        gpu=gpu_name(),
    )


@cache
def describe_software() -> Software:
    """Our version and commit, Python, the packages that can change a number, and the digest of all installed."""
    return Software(
        b2gmodel=b2gmodel.__version__,
        commit=_commit(),
        python=platform.python_version(),
        packages={name: version for name in _RECORDED_PACKAGES if (version := _version(name)) is not None},
        lock_digest=environment_digest(),
    )


def describe_clock() -> Clock:
    return Clock(domain="CLOCK_MONOTONIC", boot_id=boot_id())


def gpu_name() -> str | None:
    """The first GPU's name as the driver's tool gives it; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    lines = _output([tool, "--query-gpu=name", "--format=csv,noheader"])
    return lines.splitlines()[0] if lines else None


def _processor() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, with ``+changes`` where the tree differs."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", "--", "b2gmodel"])
    return f"{commit}+changes" if changed else commit


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
