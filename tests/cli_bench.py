"""How tests of the command line run it: in this process, with both streams seen whole."""

from __future__ import annotations

import pytest

from b2gmodel.cli import run

Out = pytest.CaptureFixture[str]
MEASURED = {1: [320.0, 322.0], 2: [600.0, 604.0], 3: [690.0, 700.0], 4: [680.0, 690.0]}


def said(capsys: Out, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a command that has nothing to complain about."""
    code = run(list(arguments))
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def complained(capsys: Out, *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr of a command that says nothing else."""
    code = run(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("b2g: ")
    assert "internal failure" not in captured.err
    return code, captured.err.removeprefix("b2g: ").rstrip("\n")
