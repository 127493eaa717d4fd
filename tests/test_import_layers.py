"""Dependencies point one way, and the core touches no clock, file, socket or shared randomness: by the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "b2gmodel"

# Lowest first. A part imports from layers below its own, and from its own where ALLOWED_WITHIN says so.
LAYERS = (
    {"errors", "units"},
    {"records"},
    {"batcher", "stats", "flights", "traces", "study_records", "placement_records"},
    {
        "laws",
        "legs",
        "closed_form",
        "network",
        "bulk",
        "bulk_chain",
        "bulk_server",
        "measured",
        "merge",
        "usl",
        "study_plan",
        "study_estimate",
        "crossover",
    },
    {
        "predictors",
        "what_if",
        "diagnostics",
        "measured_diagnostics",
        "evidence",
        "scores",
        "placement",
        "placement_scores",
    },
    {"prediction", "judge", "study_prediction", "study_judge"},
    {"advice", "advice_settings", "advice_surface", "advice_words"},
    {
        "foreign",
        "sim",
        "live",
        "store",
        "signing",
        "ledger",
        "ledger_environment",
        "ledger_lines",
        "ledger_states",
        "ledger_verify",
        "report",
    },
    {"cli", "__main__"},
)
ALLOWED_WITHIN = {
    ("advice", "advice_settings"),
    ("advice", "advice_surface"),
    ("advice", "advice_words"),
    ("advice_words", "advice_settings"),
    ("advice_words", "advice_surface"),
    ("units", "errors"),
    ("__main__", "cli"),
    ("network", "closed_form"),
    ("placement", "predictors"),
    ("bulk", "bulk_chain"),
    ("bulk", "bulk_server"),
    ("bulk", "closed_form"),
    ("bulk_chain", "bulk_server"),
    ("bulk_server", "closed_form"),
    ("laws", "closed_form"),
    ("laws", "network"),
    ("measured_diagnostics", "diagnostics"),
    ("ledger", "ledger_environment"),
    ("ledger", "ledger_lines"),
    ("ledger", "ledger_states"),
    ("ledger", "signing"),
    ("ledger", "store"),
    ("ledger_states", "ledger_lines"),
    ("ledger_verify", "ledger"),
    ("ledger_verify", "ledger_environment"),
    ("ledger_verify", "ledger_lines"),
    ("ledger_verify", "signing"),
    ("ledger_verify", "store"),
    ("live", "store"),
    ("live", "ledger"),
    ("live", "ledger_lines"),
    ("live", "ledger_environment"),
    ("live", "report"),
    ("report", "foreign"),
    ("report", "store"),
    ("report", "ledger"),
    ("report", "ledger_lines"),
    ("sim", "store"),
}
CORE = set().union(*LAYERS[1:7])
# What a core module must not import: clocks, files, sockets, processes, threads, shared randomness.
IMPURE = {
    "asyncio", "builtins", "concurrent", "ctypes", "datetime", "fcntl", "glob", "http", "io", "logging", "mmap",
    "multiprocessing", "os", "pathlib", "random", "secrets", "selectors", "shutil", "signal", "socket", "ssl",
    "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}
# Of numpy.random only what takes or makes a generator of the caller's.
RANDOM_NAMES = {"Generator", "default_rng", "SeedSequence", "PCG64", "PCG64DXSM", "BitGenerator"}


def part_of(module: str) -> str | None:
    """``b2gmodel.live.http`` belongs to ``live``; the package itself to no part."""
    names = module.split(".")
    return names[1] if names[0] == "b2gmodel" and len(names) > 1 else None


def imports(source: str, module: str) -> Iterator[str]:
    """Every module that ``source`` imports, wherever in it, also for type checking alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            yield base
            if base == "b2gmodel" or base.startswith("numpy"):
                yield from (f"{base}.{alias.name}" for alias in node.names)


def upward(module: str, source: str) -> list[str]:
    """What ``module`` imports from where it must not."""
    own = part_of(module)
    if own is None:
        return []
    faults = []
    for imported in imports(source, module):
        other = part_of(imported)
        if other is None or other == own or other == "__version__":
            continue
        if level(other) > level(own) or (level(other) == level(own) and (own, other) not in ALLOWED_WITHIN):
            faults.append(f"{module} imports {imported}")
    return faults


def level(part: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if part in layer]
    assert found, f"{part} has no layer: give it its place in LAYERS, and in design.md, section 3"
    return found[0]


def impure(module: str, source: str) -> list[str]:
    """Imports and calls by which a core module would reach outside of its arguments."""
    if part_of(module) not in CORE:
        return []
    faults = [f"{module} imports {name}" for name in imports(source, module) if name.split(".")[0] in IMPURE]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            faults.append(f"{module} calls {node.func.id}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("np.random", "numpy.random")):
            faults += [f"{module} uses numpy.random.{node.attr}"] * (node.attr not in RANDOM_NAMES)
    return faults


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(names[:-1] if names[-1] == "__init__" else names), path.read_text(encoding="utf-8")


def test_the_package_is_read() -> None:
    seen = {module for module, _ in modules()}
    assert {"b2gmodel.errors", "b2gmodel.live.http", "b2gmodel.cli"} <= seen


def test_dependencies_point_one_way() -> None:
    assert [fault for module, source in modules() for fault in upward(module, source)] == []


def test_the_core_reads_nothing_but_its_arguments() -> None:
    assert [fault for module, source in modules() for fault in impure(module, source)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("b2gmodel.errors", "from b2gmodel.units import KIB"),
        ("b2gmodel.records", "from b2gmodel import stats"),
        ("b2gmodel.batcher", "import b2gmodel.live.http"),
        ("b2gmodel.stats", "def late():\n    from b2gmodel.judge import judge"),
        ("b2gmodel.prediction", "from b2gmodel.judge import judge"),
        ("b2gmodel.judge", "from b2gmodel.prediction import predict"),
        ("b2gmodel.judge", "from b2gmodel.store import read_record"),
        ("b2gmodel.sim.kernel", "from b2gmodel.live.gateway import Gateway"),
        ("b2gmodel.live.gateway", "from b2gmodel.sim.kernel import run"),
        ("b2gmodel.live.gateway", "from ..sim import kernel"),
        ("b2gmodel.live.gateway", "if TYPE_CHECKING:\n    from b2gmodel.cli.output import say"),
        ("b2gmodel.store", "from b2gmodel.ledger import Ledger"),
    ],
)
def test_a_planted_import_is_seen(module: str, line: str) -> None:
    """The controls: the same check, on a module with one import too many."""
    assert len(upward(module, f"from b2gmodel.errors import B2GError\n{line}\n")) >= 1
    assert upward(module, "import math\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from time import monotonic",
        "def f():\n    import os.path",
        "import random",
        "x = open('f')",
        "import numpy as np\nnp.random.seed(1)",
        "import numpy as np\nx = np.random.normal()",
        "from datetime import datetime",
    ],
)
def test_a_planted_impurity_is_seen(line: str) -> None:
    assert len(impure("b2gmodel.stats", line)) >= 1
    assert impure("b2gmodel.live.http", line) == []
    assert impure("b2gmodel.stats", "import numpy as np\nrng = np.random.default_rng(1)\n") == []


# What a prediction must not have seen, and where predictions start from.
ANSWERS = {"Measurement", "Session", "Run", "Verdict", "HeightScore"}
PREDICTING = "b2gmodel.prediction"


def named(source: str) -> Iterator[str]:
    """Every name that ``source`` imports, reads as an attribute, or uses; not what docstrings say."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def reached(start: str, sources: dict[str, str]) -> set[str]:
    """The modules of ours that ``start`` imports, directly or through others; itself included."""
    found, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module in found or module not in sources:
            continue
        found.add(module)
        waiting += imports(sources[module], module)
    return found


def seen_answers(sources: dict[str, str]) -> list[str]:
    """Where a module that predictions are made with names a record that comes after them; ``records`` defines them."""
    return [
        f"{module} names {name}"
        for module in sorted(reached(PREDICTING, sources) - {"b2gmodel", "b2gmodel.records"})
        for name in named(sources[module])
        if name in ANSWERS
    ]


def test_no_prediction_is_made_with_a_module_that_takes_a_measurement() -> None:
    sources = dict(modules())
    using = reached(PREDICTING, sources)
    assert {"b2gmodel.laws", "b2gmodel.predictors", "b2gmodel.what_if", "b2gmodel.diagnostics"} <= using
    assert not {"b2gmodel.measured_diagnostics", "b2gmodel.judge", "b2gmodel.usl", "b2gmodel.store"} & using
    assert seen_answers(sources) == []


@pytest.mark.parametrize(
    "line",
    [
        "from b2gmodel.records import Measurement",
        "from b2gmodel.records import Measurement as M",
        "def late():\n    from b2gmodel.records import Run",
        "from b2gmodel import records\nseen = records.Measurement",
        "from b2gmodel import records\nseen = getattr(records, 'Measurement')",
        "from b2gmodel.measured_diagnostics import of_measurement",
        "def f(x: 'Measurement') -> None: ...",
    ],
)
@pytest.mark.parametrize("module", ["b2gmodel.prediction", "b2gmodel.laws", "b2gmodel.stats"])
def test_a_planted_measurement_is_seen(module: str, line: str) -> None:
    """The controls: the same check, with one line more in a module that predictions are made with."""
    sources = dict(modules())
    assert seen_answers(sources | {module: f"{sources[module]}\n{line}\n"}) != []


def test_a_module_without_a_place_is_seen() -> None:
    with pytest.raises(AssertionError, match="newcomer has no layer"):
        upward("b2gmodel.newcomer", "import b2gmodel.errors")
