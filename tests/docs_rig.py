"""Runs what a page of the documentation shows, and compares what comes out with what the page says.

How a page is written stands in CONTRIBUTING.md. The rules here: a page's blocks run in order, in one fresh folder, one
shell and one Python namespace; a difference is a ``DocsError`` that names page and line; nothing is skipped in silence.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
STEP_LIMIT_S: Final = 120.0
# These show data and are not run.
DATA: Final = frozenset({"text", "json", "toml", "yaml", "hex", "pbtxt", "html", "mermaid"})
# As installed; only the self-test is as tolerant as in all tests (tolerant_self_test in conftest.py).
_B2G: Final = """\
import sys

if __name__ == "__main__":
    if {"calibrate", "study", "demo"} & set(sys.argv[1:2]):
        from b2gmodel.live import self_test

        self_test._BOUND_S = 0.008
    from b2gmodel.cli import main

    main()
"""
_MARK = re.compile(r"<!-- ?(exit|no-run|within|demo command|test command)(?:: (.*?))? -->")
_FENCE = re.compile(r"^( *)(```+)(.*)$")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class DocsError(AssertionError):
    """What a page shows is not what happens."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``marks`` are the comments right before it: ``exit``, ``no-run``, ``within`` and the like."""

    kind: str
    text: str
    line: int
    marks: Mapping[str, str]

    @property
    def is_run_elsewhere(self) -> bool:
        return "demo command" in self.marks or "test command" in self.marks


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a console block, and the lines that it should print."""

    command: str
    expected: tuple[str, ...]
    line: int
    exit_codes: frozenset[int] = frozenset({0})
    within: float | None = None


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page. Raises ``DocsError`` where one has no end."""
    found: list[Block] = []
    lines = text.splitlines()
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if mark := _MARK.fullmatch(line.strip()):
            marks[mark[1]] = mark[2] or ""
        elif fence := _FENCE.match(line):
            begin, indent = number, len(fence[1])
            while number < len(lines) and lines[number].strip() != fence[2]:
                number += 1
            if number == len(lines):
                raise DocsError(f"line {begin}: a block without an end")
            body = "\n".join(each[indent:] for each in lines[begin:number])
            found.append(Block((fence[3].split() or [""])[0], body, begin, marks))
            number += 1
            marks = {}
        elif line.strip():
            marks = {}
    return found


def steps_of(block: Block) -> list[Step]:
    """The commands of a console block; ``\\`` at the end of a line continues one, and so does ``> `` at its begin."""
    parts: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            parts.append((number, [line[2:]], []))
        elif not parts:
            raise DocsError(f"line {number}: a console block begins with a command: '$ '")
        elif not parts[-1][2] and line.startswith("> "):
            parts[-1][1].append(line[2:])
        elif not parts[-1][2] and parts[-1][1][-1].endswith("\\"):
            parts[-1][1].append(line)
        else:
            parts[-1][2].append(line)
    within = float(block.marks["within"].rstrip(" %")) / 100 if "within" in block.marks else None
    last = frozenset(map(int, re.findall(r"\d+", block.marks.get("exit", "0"))))
    codes = [frozenset({0})] * (len(parts) - 1) + [last]
    return [
        Step("\n".join(command), tuple(expected), number, code, within)
        for (number, command, expected), code in zip(parts, codes, strict=True)
    ]


def refuse_other_kinds(blocks: Sequence[Block]) -> None:
    """Raises ``DocsError`` for a block that shows commands in a form which nobody would run."""
    for block in blocks:
        if block.is_run_elsewhere or "no-run" in block.marks or block.kind in {"console", "python"}:
            continue
        if block.kind.split("-")[0] not in DATA:
            raise DocsError(f"line {block.line}: a block of kind {block.kind or 'none'!r}; commands are 'console'")
        if command := re.search(r"^ *(?:\$ )?(?:b2g|python3?|pip|docker|tritonserver|curl) \S.*$", block.text, re.M):
            raise DocsError(f"line {block.line}: a command in a block of kind {block.kind!r}: {command[0].strip()}")


def assert_shown(expected: Sequence[str], seen: str, within: float | None = None) -> None:
    """Compares lines. Raises ``DocsError`` with both where they differ.

    A line of ``...`` matches any lines, and ``...`` in a line anything in it; with ``within``, a share, numbers match
    where they differ by no more, and spaces do not count.
    """
    wanted, got = (_trimmed(lines) for lines in (expected, seen.splitlines()))
    places = {0}  # where one may be in what was seen after each wanted line: a set, so that nothing is tried twice
    for line in wanted:
        if line == "...":
            places = set(range(min(places), len(got) + 1)) if places else places
        else:
            places = {place + 1 for place in places if place < len(got) and _matches(line, got[place], within)}
    if len(got) not in places:
        raise DocsError(f"shown:\n{_quoted(wanted)}\nseen:\n{_quoted(got)}")


def _trimmed(lines: Sequence[str]) -> list[str]:
    text = "\n".join(line.rstrip() for line in lines).strip("\n")
    return text.split("\n") if text else []


def _quoted(lines: Sequence[str]) -> str:
    return textwrap.indent("\n".join(lines) or "(nothing)", "  | ", lambda _: True)


def _matches(wanted: str, got: str, within: float | None) -> bool:
    if within is not None:
        numbers = [[float(each) for each in _NUMBER.findall(line)] for line in (wanted, got)]
        wanted, got = (" ".join(_NUMBER.sub("#", line).split()) for line in (wanted, got))
        pairs = zip(*numbers, strict=False)
        if "..." not in wanted and not all(abs(one - other) <= within * abs(one) for one, other in pairs):
            return False
    return re.fullmatch(".*".join(re.escape(part) for part in wanted.split("...")), got) is not None


class Shell:
    """One bash for a page: what a command leaves (folder, variables, background jobs) is there for the next."""

    def __init__(self, folder: Path, environment: Mapping[str, str], scratch: Path) -> None:
        self._scratch = scratch
        self._log = (scratch / "shell.err").open("wb")
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )

    def run(self, command: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        text, out, err, code, done = (self._scratch / f"step.{name}" for name in ("sh", "out", "err", "part", "code"))
        text.write_text(command + "\n", encoding="utf-8")
        done.unlink(missing_ok=True)
        assert self._bash.stdin is not None
        order = f'eval "$(<{text})" >{out} 2>{err} </dev/null; echo $? >{code}; mv {code} {done}\n'
        self._bash.stdin.write(order.encode())
        self._bash.stdin.flush()
        deadline_s = time.monotonic() + STEP_LIMIT_S
        while not done.exists():
            if self._bash.poll() is not None:
                raise DocsError("the shell ended: an 'exit', or a command that is not whole")
            if time.monotonic() > deadline_s:
                raise DocsError(f"not done after {STEP_LIMIT_S:g} s")
            threading.Event().wait(0.01)
        return int(done.read_text()), out.read_text(errors="replace"), err.read_text(errors="replace")

    def close(self) -> None:
        """Ends the shell and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGTERM)
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._bash.wait(10.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        self._log.close()


def environment(scratch: Path) -> dict[str, str]:
    """Ours, with ``b2g`` and ``python`` of this interpreter on PATH, and a home that is nobody's."""
    programs, home = scratch / "bin", scratch / "home"
    for folder in (programs, home):
        folder.mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, text in (("b2g", f"#!{sys.executable}\n{_B2G}"), ("python", python), ("python3", python)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("B2G_")}
    return ours | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(Path("~/.cache").expanduser()),  # fonts are listed once, not once a page
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
    }


class Page:
    """Runs blocks of one page in ``folder``. ``addresses``: text of the page -> what it stands for here."""

    def __init__(self, folder: Path, scratch: Path, addresses: Mapping[str, str]) -> None:
        self._folder = folder
        self._addresses = addresses
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self.shell = Shell(folder, environment(scratch), scratch)
        self.commands = 0
        self.examples = 0

    def run(self, blocks: Sequence[Block]) -> None:
        """Runs all blocks that are to be run. Raises ``DocsError`` at the first difference."""
        for block, after in itertools.zip_longest(blocks, blocks[1:]):
            if block.is_run_elsewhere or "no-run" in block.marks:
                continue
            if block.kind == "console":
                for step in steps_of(block):
                    with _at(step.line):
                        self._command(step)
            elif block.kind == "python":
                is_shown = after is not None and after.kind == "text" and self._follows(block, after)
                with _at(block.line):
                    self._python(block.text, after.text if after and is_shown else "")

    @staticmethod
    def _follows(block: Block, after: Block) -> bool:
        """Whether nothing but an empty line stands between two blocks."""
        return after.line - (block.line + block.text.count("\n") + 2) <= 2

    def _here(self, text: str) -> str:
        for shown, here in self._addresses.items():
            text = text.replace(shown, here)
        return text

    def _command(self, step: Step) -> None:
        code, out, err = self.shell.run(self._here(step.command))
        self.commands += 1
        if code not in step.exit_codes:
            raise DocsError(
                f"exit code {code}, shown: {sorted(step.exit_codes)}\n$ {step.command}\n{_quoted([out, err])}"
            )
        try:
            assert_shown([self._here(line) for line in step.expected], out, step.within)
        except DocsError as error:
            raise DocsError(f"$ {step.command}\n{error}\nstderr:\n{_quoted(err.splitlines()[-20:])}") from None

    def _python(self, code: str, shown: str) -> None:
        self.examples += 1
        code, shown = self._here(code), self._here(shown)
        out = io.StringIO()
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(out):
            if not code.startswith(">>> "):
                exec(compile(code, "<example>", "exec", dont_inherit=True), self._names)
            else:
                test = doctest.DocTestParser().get_doctest(code, self._names, "example", None, 0)
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
                if runner.run(test, out=out.write, clear_globs=False).failed:
                    raise DocsError(out.getvalue())
                self._names |= test.globs
        assert_shown(shown.splitlines(), out.getvalue())


@contextlib.contextmanager
def _at(line: int) -> Iterator[None]:
    try:
        yield
    except DocsError as error:
        raise DocsError(f"line {line}: {error}") from None
