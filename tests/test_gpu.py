"""A GPU's facts and samples, from a driver's library that is played: what it does not tell is None."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from b2gmodel.live.gpu import Gpu, GpuSample, GpuWatch, means


class NVMLError(Exception):
    pass


def library(**answers: object) -> SimpleNamespace:
    """A driver's library that knows these answers and refuses every other question."""

    def asked(name: str) -> object:
        def answer(*_: object) -> object:
            if name not in answers:
                raise NVMLError(name)
            return answers[name]

        return answer

    names = [
        "nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPerformanceState",
    ]  # fmt: skip
    constants = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0}
    return SimpleNamespace(NVMLError=NVMLError, **constants, **{name: asked(name) for name in names})


PRESENT = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetHandleByIndex": "gpu"}


def test_no_package_or_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpu.find() is None
    monkeypatch.setitem(sys.modules, "pynvml", library())
    assert Gpu.find() is None
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlInit=None))
    assert Gpu.find() is None


def test_what_the_driver_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlSystemGetCudaDriverVersion": 13020,
        "nvmlDeviceGetPowerUsage": 0,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=25),
    }
    monkeypatch.setitem(sys.modules, "pynvml", library(**PRESENT, **told))
    gpu = Gpu.find()
    assert gpu is not None
    facts, sample = gpu.facts(), gpu.sample()
    gpu.close()
    assert (facts.name, facts.cuda_driver, facts.driver, facts.power_limit_w) == ("NVIDIA H200", "13.2", None, None)
    assert (sample.power_w, sample.duty, sample.memory_duty) == (0.0, 0.0, 0.25)  # read, and so 0 is a reading
    assert (sample.sm_clock_mhz, sample.temperature_c, sample.power_state) == (None, None, None)


def test_means_are_of_the_window_and_of_what_was_read() -> None:
    empty = dict.fromkeys(("memory_clock_mhz", "power_w", "duty", "memory_duty", "temperature_c", "power_state"))
    samples = [
        GpuSample(at_ns=at, sm_clock_mhz=clock, **empty)
        for at, clock in ((1, 300), (2, 1900), (3, None), (4, 1980), (9, 5))
    ]
    found = means(samples, 2, 8)
    assert found["sm_clock_mhz"] == 1940
    assert found["power_w"] is None
    assert means([], 0, 9)["sm_clock_mhz"] is None


def test_without_a_gpu_nothing_is_watched() -> None:
    with GpuWatch(None) as watch:
        pass
    assert watch.samples == []
