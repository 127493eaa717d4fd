"""Sweeps: the same table from every executor, nothing lost with a worker, and an interruption keeps what is done."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from b2gmodel.cli import run
from b2gmodel.errors import SetupError, UsageError
from b2gmodel.sim.experiments import Precision
from b2gmodel.sim.predictor import simulated_curves
from b2gmodel.sim.question import Point, Question, answer
from b2gmodel.sim.sweep import Executor, Row, grid, sweep

QUESTION = Question(0.0276, 0.0613, service_cv=0.3, transport_cv=0.5, k=8)
POINTS = [
    Point(QUESTION.with_values(values), values, 1, Precision(0.02, most_cycles=1 << 17))
    for values in grid({"flights": [1, 2, 3, 4], "service_s": [0.02, 0.03]})
]


@pytest.fixture(scope="module")
def serial() -> list[Row | None]:
    rows, complete = sweep(answer, POINTS)
    assert complete
    return rows


def test_a_grid_has_every_combination_and_the_last_axis_is_fastest() -> None:
    assert grid({"a": [1, 2], "b": [3, 4]}) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
    ]
    assert grid({}) == [{}]
    with pytest.raises(UsageError, match="nothing"):
        grid({"a": []})


def test_common_random_numbers_make_throughput_rise_with_flights(serial: list[Row | None]) -> None:
    rates = [row["throughput_per_s"] for row in serial if row is not None and row["service_s"] == 0.02]
    assert rates == sorted(rates)


@pytest.mark.parametrize("workers", [1, 2])
def test_joblib_gives_the_serial_table_bit_for_bit(serial: list[Row | None], workers: int) -> None:
    rows, complete = sweep(answer, POINTS, executor=Executor.JOBLIB, workers=workers)
    assert complete
    assert rows == serial


def test_an_interruption_keeps_what_is_done() -> None:
    def interrupted(point: int) -> int:
        if point == 3:
            raise KeyboardInterrupt
        return point * point

    results, complete = sweep(interrupted, range(6))
    assert not complete
    assert results == [0, 1, 4, None, None, None]


def test_an_interruption_of_processes_keeps_what_is_done_and_says_no_more() -> None:
    """Between two results, where joblib would warn of the work that is broken off; a warning is an error here."""

    def interrupt(count: int, _: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    squares, complete = sweep(slow_square, range(8), executor=Executor.JOBLIB, workers=2, done=interrupt)
    assert not complete
    assert len([square for square in squares if square is not None]) == 2


def test_a_scheduler_belongs_to_dask() -> None:
    with pytest.raises(UsageError, match="scheduler"):
        sweep(answer, POINTS, executor=Executor.DASK)
    with pytest.raises(UsageError, match="scheduler"):
        sweep(answer, POINTS, scheduler="tcp://127.0.0.1:1")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two worker processes, as an operator would start them."""
    pytest.importorskip("distributed")
    address_file = tmp_path / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    common = ["--scheduler-file", str(address_file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
         *common],
        env=environment, **quiet,
    )  # fmt: skip
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-nanny", "--no-dashboard",
             "--host", "127.0.0.1", *common],
            env=environment, **quiet,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        from distributed import Client

        with Client(scheduler_file=str(address_file), timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address
        yield address, workers
    finally:
        for process in (*workers, scheduler):
            process.terminate()
        for process in (*workers, scheduler):
            process.wait(timeout=30)


def slow_square(point: int) -> int:
    time.sleep(0.3)
    return point * point


def test_a_cluster_gives_the_serial_table_and_loses_nothing_with_a_worker(
    serial: list[Row | None],
    cluster: tuple[str, list[subprocess.Popen[bytes]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, workers = cluster
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        rows, complete = sweep(answer, POINTS, executor=Executor.DASK, scheduler=address)
        assert complete
        assert rows == serial

        def kill_one(count: int, _: int) -> None:
            if count == 2:
                os.kill(workers[0].pid, signal.SIGKILL)

        # The document's own command, at this cluster's address.
        document = (Path(__file__).parents[1] / "docs" / "simulation.md").read_text(encoding="utf-8")
        (command,) = re.findall(r"^\$ b2g ((?:.*\\\n)*.*--scheduler .*)$", document, re.MULTILINE)
        monkeypatch.chdir(tmp_path)
        assert run([*shlex.split(command.replace("\\\n", " ").replace("tcp://127.0.0.1:8786", address)), "-q"]) == 0
        assert len(pd.read_parquet("grid.parquet")) == 6

        squares, complete = sweep(slow_square, range(10), executor=Executor.DASK, scheduler=address, done=kill_one)
    assert complete
    assert squares == [point * point for point in range(10)]
    assert workers[0].wait(timeout=30) == -signal.SIGKILL


def test_no_scheduler_is_one_clear_line() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(SetupError, match="no Dask scheduler answers"):
        sweep(answer, POINTS, executor=Executor.DASK, scheduler="tcp://127.0.0.1:1")


def test_bootstrap_curves_do_not_depend_on_the_workers() -> None:
    lines = [Question(0.02, 0.01 * draw, service_cv=0.3).line() for draw in range(1, 6)]
    alone = simulated_curves(lines, [1, 2, 4], 3, cycles=500)
    assert alone.shape == (5, 3)
    assert np.array_equal(alone, simulated_curves(lines, [1, 2, 4], 3, cycles=500, workers=2))
    assert np.array_equal(alone[:2], simulated_curves(lines[:2], [1, 2, 4], 3, cycles=500))
