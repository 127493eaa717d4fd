"""Each command's help: an example that parses, exit codes, units and defaults, in 80 columns; and shell completion."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from b2gmodel.cli import app

CLI = Path(__file__).parents[1] / "b2gmodel" / "cli"
ROOT = typer.main.get_command(app)


def commands(command: Any = ROOT, path: tuple[str, ...] = ("b2g",)) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(path), command
        return
    for name, child in children.items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands())


def help_of(path: str) -> str:
    """As in a terminal of 80 columns."""
    return CliRunner().invoke(app, [*path.split()[1:], "--help"], terminal_width=80, prog_name="b2g").output


def test_all_commands_are_seen() -> None:
    assert {"b2g mstar", "b2g serve", "b2g study plan", "b2g ledger verify"} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_and_says_how_to_begin_and_what_comes_back(path: str) -> None:
    text = help_of(path)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    flat = " ".join(text.split())
    assert "Exit codes: 0 " in flat
    assert f"Example: {path}" in flat
    assert ("TIME: a number with its unit" in flat) is bool(re.search(r"^ .*--?\S+ TIME", text, re.MULTILINE))


@pytest.mark.parametrize("path", COMMANDS)
def test_the_example_is_one_that_the_parser_takes(path: str) -> None:
    command = COMMANDS[path]
    assert command.epilog is not None
    example = command.epilog.split("Example: ")[1]
    arguments = shlex.split(example)[len(path.split()) :]
    command.make_context(path, arguments)


def test_an_example_with_a_misspelt_option_is_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        COMMANDS["b2g mstar"].make_context("b2g mstar", ["--servize", "1ms"])


@pytest.mark.parametrize("path", COMMANDS)
def test_a_default_is_shown(path: str) -> None:
    blocks = re.split(r"\n  (?=-)", help_of(path).split("Options:\n")[1])
    for parameter in COMMANDS[path].params:
        block = next((each for each in blocks if each.strip().startswith(parameter.opts[0])), "")
        takes_a_value = parameter.param_type_name == "option" and not parameter.is_flag
        if takes_a_value and parameter.default not in (None, [], ()):
            assert "[default:" in block, f"{parameter.opts[0]}: {block}"


def duration_options() -> Iterator[tuple[str, str]]:
    """File and name of each option whose text is read as a time: by the call that reads it."""
    for file in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"parse_duration_s", "seconds"}:
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                yield from ((file.name, text) for text in texts if str(text).startswith("--"))


def test_each_option_that_is_read_as_a_time_says_so() -> None:
    found = sorted(set(duration_options()))
    assert len(found) > 15
    for file, option in found:
        source = (CLI / file).read_text(encoding="utf-8")
        assert re.search(rf'"{option}",\s*metavar="TIME"', source), f"{file}: {option}"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("b2g serve --transport ", ["http", "grpc", "shm"]),
        ("b2g server --model res", ["resnet50"]),
        ("b2g study plan q", ["quick"]),
        ("b2g val", ["validate"]),
    ],
)
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    words = typed.split(" ")
    environment = os.environ | {
        "_B2G_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    b2g = Path(sys.executable).with_name("b2g")
    done = subprocess.run([b2g], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == offered
