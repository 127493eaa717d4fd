"""How often the judge is right, on truths that we know: the benchmark's bars with fewer draws."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "judge_power.py"


@pytest.fixture(scope="module")
def power() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_power", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["judge_power"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["right", "15 % too high", "pure noise"])
def test_a_bar(power: ModuleType, name: str) -> None:
    """Less two standard errors of so few draws."""
    case, draws = next(each for each in power.CASES if each.name == name), 40
    counts = power.outcomes(case, draws=draws, seed=11)
    assert counts[case.expected] >= draws * power.BAR - 2 * (draws * power.BAR * (1 - power.BAR)) ** 0.5
    if name == "pure noise":
        assert counts["held"] == 0
