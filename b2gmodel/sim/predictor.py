"""The ``simulation`` predictor's core: whole curves X(M) for many draws of a calibration, over several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from b2gmodel.errors import UsageError
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.experiments import throughput_curve
from b2gmodel.sim.stations import Line
from b2gmodel.sim.sweep import Executor, sweep


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Consecutive draws, the first of them number ``first``."""

    lines: tuple[Line, ...]
    first: int
    flights: tuple[int, ...]
    seed: int
    cycles: int
    warmup: int


def simulated_curves(
    lines: Sequence[Line],
    flights: Sequence[int],
    seed: int,
    *,
    cycles: int = 20_000,
    warmup: int = 1_000,
    workers: int = 1,
) -> Floats:
    """X(M) in batches a second, shape ``[lines, len(flights)]``; the same whatever the number of workers.

    Args:
        lines: one for each draw of the calibration's uncertainty.
        flights: the M of the curve; all on the same random numbers, draw by draw.
        seed: of the simulation's own randomness.
        cycles, warmup: for each M, counted and left out.
        workers: processes.

    Raises:
        UsageError: no line, no flights, or no cycles.
    """
    if not lines or not flights or cycles < 1:
        raise UsageError("nothing to simulate", observed=f"{len(lines)} draws, {len(flights)} M, {cycles} cycles")
    # Few large pieces: sending a piece costs about as much as ten curves of it.
    pieces = np.array_split(np.arange(len(lines)), min(len(lines), 4 * workers))
    tasks = [
        _Task(
            tuple(lines[draw] for draw in piece),
            int(piece[0]),
            tuple(flights),
            seed,
            cycles,
            warmup,
        )
        for piece in pieces
    ]
    executor = Executor.SERIAL if workers == 1 else Executor.JOBLIB
    curves, complete = sweep(_curves, tasks, executor=executor, workers=workers)
    if not complete:
        raise KeyboardInterrupt
    return np.concatenate([curve for curve in curves if curve is not None])


def _curves(task: _Task) -> Floats:
    return np.array(
        [
            throughput_curve(
                line,
                task.flights,
                np.random.SeedSequence(task.seed, spawn_key=(draw,)),
                cycles=task.cycles,
                warmup=task.warmup,
            )
            for draw, line in enumerate(task.lines, task.first)
        ]
    )
