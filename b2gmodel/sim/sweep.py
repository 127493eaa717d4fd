"""Many runs: a grid of points, each with its seed, on one process, several, or a cluster.

Rules here: a point's result depends on the point alone, so that tables are bit-identical whatever ran them and in
whatever order; every point gets the same seed (common random numbers), replications get spawned ones. What is done
is handed over as it is done: an interruption keeps it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from b2gmodel.errors import SetupError, UsageError

P = TypeVar("P")
T = TypeVar("T")

Row: TypeAlias = dict[str, Any]
Done: TypeAlias = Callable[[int, int], None]
"""Told how many points are done, and of how many."""


class Executor(StrEnum):
    """What runs the points."""

    SERIAL = "serial"
    JOBLIB = "joblib"
    DASK = "dask"


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Every combination of the axes' values, the last axis fastest. Raises ``UsageError`` for an axis without any."""
    empty = [name for name, values in axes.items() if not values]
    if empty:
        raise UsageError("a sweep over nothing", observed=0, allowed="at least one value", where=empty[0])
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def sweep(
    task: Callable[[P], T],
    points: Sequence[P],
    *,
    executor: Executor = Executor.SERIAL,
    workers: int = 1,
    scheduler: str | None = None,
    done: Done | None = None,
) -> tuple[list[T | None], bool]:
    """``task`` of every point.

    Args:
        task: a function that can be pickled; its result depends on the point alone.
        points: what to run.
        executor: ``joblib`` takes ``workers`` processes of this machine, ``dask`` the cluster at ``scheduler``,
            which runs a point again when its worker dies.
        workers: for joblib.
        scheduler: address of a Dask scheduler, ``tcp://HOST:PORT``.
        done: called after each point.

    Returns:
        The results in the order of the points, None where an interruption came first; and whether all are there.

    Raises:
        UsageError: a scheduler without Dask, or Dask without one.
        SetupError: Dask is not installed, or nothing answers at its address.
    """
    if (executor is Executor.DASK) != (scheduler is not None):
        raise UsageError(
            "a scheduler belongs to the dask executor, and it needs one",
            observed=f"{executor} with scheduler {scheduler}",
            where="--scheduler",
            hint="write --executor dask --scheduler tcp://HOST:PORT",
        )
    results: list[T | None] = [None] * len(points)
    if executor is Executor.DASK:
        assert scheduler is not None
        finished = _on_dask(task, points, scheduler)
    else:
        finished = _on_joblib(task, points, workers) if executor is Executor.JOBLIB else _here(task, points)
    count = 0
    try:
        for index, result in finished:
            results[index] = result
            count += 1
            if done is not None:
                done(count, len(points))
    except KeyboardInterrupt:
        return results, False
    finally:
        with warnings.catch_warnings():
            # That it breaks off what runs is the purpose, and no news.
            warnings.filterwarnings("ignore", "(?s).*to limit unnecessary computation", UserWarning)
            finished.close()
    return results, True


def _here(task: Callable[[P], T], points: Sequence[P]) -> Generator[tuple[int, T], None, None]:
    for index, point in enumerate(points):
        yield index, task(point)


def _numbered(task: Callable[[P], T], index: int, point: P) -> tuple[int, T]:
    return index, task(point)


def _on_joblib(task: Callable[[P], T], points: Sequence[P], workers: int) -> Generator[tuple[int, T], None, None]:
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
    yield from parallel(delayed(_numbered)(task, index, point) for index, point in enumerate(points))


def _on_dask(task: Callable[[P], T], points: Sequence[P], scheduler: str) -> Generator[tuple[int, T], None, None]:
    try:
        import distributed
    except ImportError as error:
        raise SetupError(
            "Dask is not installed", where="--executor dask", hint="pip install 'b2gmodel[cluster]'"
        ) from error
    # Its functions have no types.
    cluster: Any = distributed
    try:
        client = cluster.Client(scheduler, timeout=5, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SetupError(
            "no Dask scheduler answers", observed=str(error), where=scheduler, hint="check the address"
        ) from error
    with client:
        # Pure is off: equal points in two sweeps are two runs, and results leave the cluster as they come.
        futures = [client.submit(_numbered, task, index, point, pure=False) for index, point in enumerate(points)]
        try:
            for future in cluster.as_completed(futures, loop=client.loop):
                yield future.result()
        finally:
            client.cancel(futures)
