"""What the embedded server's workloads compute with: emulation, onnxruntime or PyTorch, as ``--compute`` says it.

Which device a real engine has is found before the server starts, by asking in a process of its own; the server's
model then runs on exactly that or not at all. No clock here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from b2gmodel.errors import SetupError, UsageError
from b2gmodel.records import engine_sentence

MOST_THREADS: Final = 256

_PROBE: Final = Path(__file__).with_name("engine_probe.py")
_PROBE_PATIENCE_S: Final = 120.0
_HINTS: Final = {
    "torch": "install PyTorch: pip install torch",
    "onnx": "pip install 'b2gmodel[triton]'",
    "onnxruntime": "pip install 'b2gmodel[triton]'",
}
_ALLOWED: Final = "emulated, emulated:FILE, onnx or torch, the latter two also as in onnx:cpu,threads=2"


class Device(StrEnum):
    """Where a real engine is to compute; AUTO is a GPU where the engine has one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Emulated:
    """Tabled times.

    Attributes:
        table: the file of the table; None for the built-in one.
    """

    table: Path | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A real engine as asked for: ``onnx`` or ``torch``, a device, and threads of an instance's operators on a CPU."""

    engine: str
    device: Device = Device.AUTO
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Engine:
    """A real engine as found.

    Attributes:
        name: ``onnx`` or ``torch``.
        version: of onnxruntime or PyTorch.
        provider: what it computes on, in its own words: ``CPUExecutionProvider``, ``cuda``.
        device_name: the GPU's name, None without one or where the engine does not tell.
        threads: of an instance's operators on a CPU.
    """

    name: str
    version: str
    provider: str
    device_name: str | None
    threads: int

    @property
    def on_gpu(self) -> bool:
        return "cuda" in self.provider.lower()

    @property
    def sentence(self) -> str:
        """For a person: ``onnxruntime 1.32.0 on CPUExecutionProvider, 1 thread an instance``."""
        return engine_sentence(self.name, self.version, self.provider, self.device_name, self.threads)


def parse_compute(text: str, *, where: str = "--compute") -> Emulated | Wish:
    """What ``emulated``, ``emulated:FILE``, ``onnx``, ``onnx:cuda`` or ``torch:cpu,threads=4`` asks for.

    Raises:
        UsageError: none of these.
    """
    kind, colon, rest = text.partition(":")
    if kind == "emulated" and bool(colon) == bool(rest):
        return Emulated(Path(rest) if rest else None)
    wish = _wish(kind, rest.split(",") if colon else []) if kind in ("onnx", "torch") else None
    if wish is None:
        raise UsageError(
            "not a kind of compute",
            observed=text,
            allowed=_ALLOWED,
            where=where,
            hint="the built-in table is a TOML file that you can copy: b2g server --show-table",
        )
    return wish


def _wish(engine: str, words: list[str]) -> Wish | None:
    device, threads = Device.AUTO, 1
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and word in set(Device):
            device = Device(word)
        elif key == "threads" and value.isascii() and value.isdecimal() and 1 <= int(value) <= MOST_THREADS:
            threads = int(value)
        else:
            return None
    return Wish(engine, device, threads)


def find_engine(wish: Wish) -> Engine:
    """The engine asked for, asked which device it computes on.

    Raises:
        SetupError: it is not installed, or has no such device.
    """
    # Without -P the programs beside the probe would stand in for Python's own of the same names.
    command = [sys.executable, "-P", str(_PROBE), wish.engine, str(wish.device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_PATIENCE_S, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        found = {"problem": f"it did not answer ({type(error).__name__})"}
    if "problem" in found:
        raise SetupError(
            "the engine cannot compute here",
            observed=found["problem"],
            where=f"--compute {wish.engine}" + ("" if wish.device is Device.AUTO else f":{wish.device}"),
            hint=_HINTS.get(found.get("missing", ""), "--compute onnx:cpu needs no GPU, emulated nothing at all"),
        )
    return Engine(wish.engine, found["version"], found["provider"], found["device_name"], wish.threads)
