"""The GPU script's rules about time and order, with a clock and commands that are played; and what it refuses."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "calibration" / "gpu"
S = 1_000_000_000


@pytest.fixture(scope="module")
def steps() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("steps")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("steps", "plan"):
            sys.modules.pop(name, None)


class Machine:
    """A clock that commands move on: each takes its seconds, or what was left of them."""

    def __init__(self, seconds: dict[str, float], codes: dict[str, int] | None = None) -> None:
        self.now_s = 0.0
        self.seconds, self.codes = seconds, codes or {}
        self.ran: list[str] = []

    def now_ns(self) -> int:
        return round(self.now_s * S)

    def execute(self, step: object, left_s: float) -> int | None:
        name = step.name  # type: ignore[attr-defined]
        self.ran.append(name)
        self.now_s += min(left_s, self.seconds[name])
        return self.codes.get(name, 0) if self.seconds[name] <= left_s else None


def test_all_that_fits_is_done_in_order(steps: ModuleType) -> None:
    machine = Machine({"a": 10, "b": 20})
    found = steps.run_steps([steps.Step("a", ()), steps.Step("b", ())], 60 * S, machine.now_ns, machine.execute)
    assert [(each.name, each.state, each.begin_ns, each.end_ns) for each in found] == [
        ("a", "done", 0, 10 * S),
        ("b", "done", 10 * S, 30 * S),
    ]
    assert steps.exit_code(found) == 0


def test_what_no_longer_fits_is_named_and_a_shorter_one_still_runs(steps: ModuleType) -> None:
    machine = Machine({"a": 50, "long": 40, "short": 5})
    plan = [steps.Step("a", ()), steps.Step("long", (), 30.0), steps.Step("short", (), 5.0)]
    found = steps.run_steps(plan, 60 * S, machine.now_ns, machine.execute)
    assert [each.state for each in found] == ["done", "not reached", "done"]
    assert found[1].why == "10 s left, it needs 30"
    assert machine.ran == ["a", "short"]
    assert steps.exit_code(found) == 3


def test_one_that_runs_over_is_stopped_at_the_deadline(steps: ModuleType) -> None:
    machine = Machine({"a": 100, "b": 1})
    found = steps.run_steps([steps.Step("a", ()), steps.Step("b", ())], 60 * S, machine.now_ns, machine.execute)
    assert [(each.state, each.code) for each in found] == [("stopped", None), ("not reached", None)]
    assert found[0].end_ns == 60 * S


def test_what_needs_a_failed_step_is_not_tried(steps: ModuleType) -> None:
    machine = Machine({"a": 1, "b": 1, "c": 1, "d": 1}, {"a": 4, "d": 3})
    plan = [
        steps.Step("a", ()),
        steps.Step("b", (), needs=("a",)),
        steps.Step("c", (), needs=("b",)),
        steps.Step("d", (), fine=(0, 1, 3)),
    ]
    found = steps.run_steps(plan, 60 * S, machine.now_ns, machine.execute)
    assert [(each.state, each.why) for each in found] == [
        ("failed", "exit code 4"),
        ("not reached", "it needs a"),
        ("not reached", "it needs b"),
        ("done", None),
    ]
    assert machine.ran == ["a", "d"]


def test_a_failed_step_may_be_tried_again(steps: ModuleType) -> None:
    class Busy(Machine):
        def execute(self, step: object, left_s: float) -> int | None:
            return super().execute(step, left_s) if self.ran else super().execute(step, left_s) or 3

    machine = Busy({"a": 10})
    found = steps.run_steps([steps.Step("a", (), 5.0, tries=2)], 60 * S, machine.now_ns, machine.execute)
    assert [(each.state, each.begin_ns) for each in found] == [("done", 10 * S)]
    machine = Busy({"a": 10})
    (only,) = steps.run_steps([steps.Step("a", (), 5.0, tries=2)], 12 * S, machine.now_ns, machine.execute)
    assert (only.state, only.why) == ("failed", "exit code 3")


def test_the_plan_begins_with_what_matters_most(steps: ModuleType, tmp_path: Path) -> None:
    module = importlib.import_module("plan")
    found = module.plan(tmp_path, "onnx", module.GPU)
    names = [step.name for step in found]
    assert names[:8] == [
        f"{verb}-{model}"
        for model in ("resnet50", "yolov8n")
        for verb in ("calibrate", "predict", "measure", "validate")
    ]
    assert names[8:11] == ["idle-resnet50", "study", "judge-study"]
    assert len(set(names)) == len(names) == 19
    needed = {name for step in found for name in step.needs}
    assert needed <= set(names)
    # A GPU's whole plan for the two models that matter fits into eight minutes by its own least times.
    assert sum(step.least_s for step in found[:11]) < 8 * 60


def test_what_lacks_is_one_line(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'pytriton'\" >&2\nexit 1\n")
    fake.chmod(0o755)
    done = subprocess.run(
        [str(FOLDER / "run.sh"), str(tmp_path / "out")],
        env={"PATH": os.environ["PATH"], "B2G_PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "run.sh: no Python here has all that b2gmodel[triton] needs (ModuleNotFoundError: No module named 'pytriton'); "
        "name one with B2G_PYTHON, or a folder of wheels with B2G_WHEELS\n"
    )


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    done = subprocess.run([str(FOLDER / "run.sh"), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"run.sh: {tmp_path} is not empty: name a new folder\n")
