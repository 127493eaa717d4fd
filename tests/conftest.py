"""What all tests share: real components, and the rule that a missing one is a failure where it must be there."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from b2gmodel.live.server import EmbeddedServer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With B2G_REQUIRE_REAL set, a skipped test of a real component is a failed one."""
    report = yield
    if report.skipped and os.environ.get("B2G_REQUIRE_REAL") and item.get_closest_marker("real"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but real components are required here: {report.longrepr}"
    return report


@pytest.fixture
def tolerant_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test's bound is for a quiet machine, which one that runs tests is not.

    It stays below the delay that is injected, so that a delay booked elsewhere still fails.
    """
    from b2gmodel.live import self_test

    monkeypatch.setattr(self_test, "_BOUND_S", 0.008)


@pytest.fixture(scope="session")
def triton() -> Iterator[EmbeddedServer]:
    """A real Triton with the resnet50 workload, shared by the tests that leave it as it is."""
    if find_spec("pytriton") is None:
        pytest.skip("the embedded server's wheel is not installed: pip install 'b2gmodel[triton]'")
    from b2gmodel.live.server import EmbeddedServer
    from b2gmodel.live.workloads import load_workloads

    with EmbeddedServer.start(load_workloads(), models=("resnet50",)) as server:
        yield server
