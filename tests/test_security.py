"""No pickle, no eval, no shell, in any module; and the lock pins all that the project asks for."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# joblib and Dask pickle our own objects between our own processes: not a file, and not a stranger's bytes.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield node.func.id
            if ast.unparse(node.func) in {"os.system", "os.popen", "subprocess.getoutput", "np.load", "numpy.load"}:
                yield ast.unparse(node.func)
            shell = next((word.value for word in node.keywords if word.arg == "shell"), None)
            if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
                yield "shell=True"


def test_nothing_runs_what_it_reads() -> None:
    modules = sorted((ROOT / "b2gmodel").rglob("*.py"))
    assert len(modules) > 100
    assert [(path.name, found) for path in modules for found in dangers(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "def late():\n    from pickle import loads",
        "eval(text)",
        "import os\nos.system(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import numpy as np\nnp.load(path)",
    ],
)
def test_a_planted_danger_is_seen(line: str) -> None:
    assert list(dangers(f"import json\n{line}\n")) != []


def pins() -> dict[str, str]:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def asked_for() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in (
        *project["dependencies"],
        *(each for name in ("triton", "test", "docs", "cluster") for each in extras[name]),
    ):
        wanted = Requirement(text)
        if wanted.name != "b2gmodel" and (
            wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11", "platform_system": "Linux"})
        ):
            yield wanted


def test_the_lock_pins_what_is_asked_for() -> None:
    locked = pins()
    unpinned = [
        str(wanted)
        for wanted in asked_for()
        if not wanted.specifier.contains(locked.get(canonicalize_name(wanted.name), "0"), prereleases=True)
    ]
    assert unpinned == [], "make the lock anew: docs/security.md"


def test_each_pin_has_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 50
    assert [entry.split("==")[0] for entry in entries if "--hash=sha256:" not in entry] == []
