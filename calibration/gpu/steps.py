"""Steps under one deadline: most important first, each with the time that it needs at least.

The rules, without a clock or a process of their own: a step begins only where its least time is left and all that it
needs is done; it is stopped at the deadline; what did not run is named with its reason. A later step that needs less
time may still run where an earlier one no longer fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

NS_PER_S = 1_000_000_000


class State(StrEnum):
    """What became of a step."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Step:
    """One command.

    Attributes:
        name: unique, also the name of its log.
        arguments: the command.
        least_s: with less time left it does not begin.
        needs: steps that must be done before.
        fine: exit codes of a step that is done; a verdict has several.
        tries: a machine that was busy for a moment may be quiet the next time.
    """

    name: str
    arguments: tuple[str, ...]
    least_s: float = 1.0
    needs: tuple[str, ...] = ()
    fine: tuple[int, ...] = (0,)
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step; ``code`` is None where it did not run to its end, times where it did not begin."""

    name: str
    state: State
    code: int | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    why: str | None = None


Execute = Callable[[Step, float], int | None]
"""Runs a step for so many seconds at most: its exit code, None where it was stopped."""


def run_steps(steps: Iterable[Step], deadline_ns: int, now_ns: Callable[[], int], execute: Execute) -> list[Outcome]:
    """Every step's outcome, in order."""
    outcomes: list[Outcome] = []
    for step in steps:
        outcomes.append(_run(step, deadline_ns, now_ns, execute, {each.name: each for each in outcomes}))
    return outcomes


def _run(
    step: Step, deadline_ns: int, now_ns: Callable[[], int], execute: Execute, before: dict[str, Outcome]
) -> Outcome:
    missing = [name for name in step.needs if before[name].state is not State.DONE]
    if missing:
        return Outcome(step.name, State.NOT_REACHED, why=f"it needs {', '.join(missing)}")
    found = Outcome(step.name, State.NOT_REACHED)
    for _ in range(step.tries):
        begin_ns = now_ns()
        left_s = (deadline_ns - begin_ns) / NS_PER_S
        if left_s < step.least_s:
            why = found.why or f"{max(0.0, left_s):.0f} s left, it needs {step.least_s:.0f}"
            return replace(found, why=why)
        found = _ended(step, execute(step, left_s), begin_ns, now_ns())
        if found.state is not State.FAILED:
            break
    return found


def _ended(step: Step, code: int | None, begin_ns: int, end_ns: int) -> Outcome:
    if code is None:
        return Outcome(step.name, State.STOPPED, None, begin_ns, end_ns, "the time was over")
    if code in step.fine:
        return Outcome(step.name, State.DONE, code, begin_ns, end_ns)
    return Outcome(step.name, State.FAILED, code, begin_ns, end_ns, f"exit code {code}")


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """0 where all was done, 3 where something was not."""
    return 0 if all(each.state is State.DONE for each in outcomes) else 3
