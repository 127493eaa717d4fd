"""The first GPU's facts and how it fares over time, from the driver's library; None where it does not tell.

Needs the package ``nvidia-ml-py`` (imported only when asked) and a driver. Without either there is no GPU to tell of:
nothing is 0 that was not read. Samples carry CLOCK_MONOTONIC, so that they can be laid beside flights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Final, Self

SAMPLE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What does not change while it runs."""

    name: str | None
    driver: str | None
    cuda_driver: str | None
    memory_bytes: int | None
    power_limit_w: float | None
    max_sm_clock_mhz: int | None
    max_memory_clock_mhz: int | None
    persistence: bool | None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading. ``duty`` and ``memory_duty`` are the driver's shares of its last sample period in use, 0 to 1."""

    at_ns: int
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    duty: float | None
    memory_duty: float | None
    temperature_c: int | None
    power_state: int | None


class Gpu:
    """The first GPU, open until ``close``. ``Gpu.find()`` is the way to it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def find(cls) -> Gpu | None:
        """The first GPU; None without one, without its driver or without the package."""
        try:
            import pynvml
        except ModuleNotFoundError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
        except pynvml.NVMLError:
            return None

    def facts(self) -> GpuFacts:
        nvml, handle = self._nvml, self._handle
        version = self._ask(nvml.nvmlSystemGetCudaDriverVersion)
        return GpuFacts(
            name=self._ask(nvml.nvmlDeviceGetName, handle),
            driver=self._ask(nvml.nvmlSystemGetDriverVersion),
            cuda_driver=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            memory_bytes=self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            power_limit_w=self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
            max_sm_clock_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            max_memory_clock_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
            persistence=self._ask(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))),
        )

    def sample(self) -> GpuSample:
        nvml, handle = self._nvml, self._handle
        used = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        return GpuSample(
            at_ns=time.monotonic_ns(),
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            power_w=self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            duty=None if used is None else used.gpu / 100,
            memory_duty=None if used is None else used.memory / 100,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_state=self._ask(nvml.nvmlDeviceGetPerformanceState, handle),
        )

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        """The answer; None where this GPU or driver does not know the question."""
        try:
            answer = question(*about)
        except self._nvml.NVMLError:
            return None
        return answer.decode() if isinstance(answer, bytes) else answer


class GpuWatch:
    """Samples in a thread of its own for as long as its ``with`` block runs; without a GPU there are none."""

    def __init__(self, gpu: Gpu | None, period_s: float = SAMPLE_S) -> None:
        self._gpu, self._period_s = gpu, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.samples: list[GpuSample] = []

    def __enter__(self) -> Self:
        if self._gpu is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._gpu is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._gpu is not None
        while not self._over.wait(self._period_s):
            self.samples.append(self._gpu.sample())


def means(samples: Iterable[GpuSample], begin_ns: int, end_ns: int) -> dict[str, float | None]:
    """The mean of each reading from ``begin_ns`` to ``end_ns``; None where nothing was read."""
    within = [sample for sample in samples if begin_ns <= sample.at_ns <= end_ns]
    return {
        field.name: _mean([getattr(sample, field.name) for sample in within])
        for field in fields(GpuSample)
        if field.name != "at_ns"
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
