"""Help and the closed form answer at once: they load nothing heavy. Seen in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["numpy", "scipy", "pandas", "pydantic", "matplotlib", "pyarrow", "rich", "h11", "uvloop", "simpy", "asyncio"]
CODE = """
import json, sys
from b2gmodel.cli import run
code = run(sys.argv[1:])
print(json.dumps([code, [name for name in {heavy!r} if name in sys.modules]]))
"""


def loaded(*arguments: str) -> tuple[int, list[str]]:
    """The exit code, and which of ``HEAVY`` are loaded after ``b2g`` with these arguments."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=HEAVY), *arguments], capture_output=True, text=True, check=True
    )
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    return code, heavy


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["mstar", "--service", "27.6ms", "--transport", "61.3ms"],
        ["mstar", "--service", "27.6ms", "--transport", "61.3ms", "--json"],
        ["calibrate", "--help"],
    ],
)
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    assert loaded(*arguments) == (0, [])


def test_the_check_sees_what_is_loaded() -> None:
    """The control: a command that needs records loads what reads them."""
    code, heavy = loaded("predict", "no-such-file.json")
    assert code == 2
    assert {"pydantic", "numpy"} <= set(heavy)
