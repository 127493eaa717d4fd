"""Everything that README and documentation show is run: commands, outputs, Python; what cannot be is counted here."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import docs_rig as rig
import numpy
import pytest
import typer

from b2gmodel.cli import app

# What cannot run in a test: page -> reason -> blocks. A block that is not counted here fails.
NOT_RUN: dict[str, dict[str, int]] = {
    "README.md": {"installs from the package index": 1},
    "docs/how-to/own-null-model.md": {"this server takes no orders to load models": 1},
    "docs/how-to/own-triton.md": {
        "needs docker and a GPU": 1,
        "needs a server that was started with a trace file": 1,
    },
    "docs/tutorial.md": {"installs from the package index": 1},
    "docs/preregistration.md": {"needs a network": 1},
    "docs/security.md": {
        "downloads every package anew": 1,
        "needs a package index and an advisory service": 1,
    },
    "docs/simulation.md": {"needs a Dask cluster": 1},
    "docs/study.md": {"takes ten minutes": 1},
    "CONTRIBUTING.md": {"installs from the package index": 1, "the tests themselves": 1},
}
OWN = Path(__file__).parent / "data" / "own_model"
PAGES = {
    str(path.relative_to(rig.ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(
        [*rig.ROOT.glob("*.md"), *(rig.ROOT / "docs").rglob("*.md"), rig.ROOT / "benchmarks" / "README.md"]
    )
}


def directive(text: str, name: str) -> str | None:
    """What a page says of itself in a comment near its top."""
    found = re.search(rf"^<!-- {name}: (\S+) -->$", "\n".join(text.splitlines()[:10]), re.M)
    return found[1] if found else None


def is_real(text: str) -> bool:
    return any(directive(text, name) for name in ("server", "needs"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def served(kind: str | None) -> Iterator[dict[str, str]]:
    """What ``localhost:8000`` (a server), ``127.0.0.1:8100`` (a proxy) and the like stand for while a page runs.

    ``kind``: ``triton``, ``own`` (with ``mymodel`` and its null twin beside the workloads), or None for no server.
    """
    proxy = dict.fromkeys(("localhost:8100", "127.0.0.1:8100"), f"127.0.0.1:{free_port()}")
    if kind is None:
        yield proxy
        return
    if find_spec("pytriton") is None:
        pytest.skip("the embedded server's wheel is not installed: pip install 'b2gmodel[triton]'")
    from b2gmodel.live import server
    from b2gmodel.live.workloads import load_workloads

    with contextlib.ExitStack() as stack:
        if kind == "own":
            plain = server.embedded_repository
            own = mock.patch.object(server, "embedded_repository", lambda *given: {**plain(*given), **own_model()})
            stack.enter_context(own)
        running = stack.enter_context(server.EmbeddedServer.start(load_workloads()))
        yield proxy | {
            f"localhost:{port}": "{}:{}".format(*address)
            for port, address in (
                (8000, running.http_address),
                (8001, running.grpc_address),
                (8002, running.metrics_address),
            )
        }


def own_model() -> dict[str, str]:
    """A model that is none of ours, and the null twin that ``b2g server --export-null`` writes for it."""
    from b2gmodel.live.repository import export_null_model
    from b2gmodel.live.tensors import TensorSpec

    found = f"import sys\n\nsys.path.insert(0, {str(Path(numpy.__file__).parents[1])!r})\n"
    files = {
        str(path.relative_to(OWN)): path.read_text(encoding="utf-8")
        for path in (OWN / "mymodel" / "config.pbtxt", OWN / "mymodel" / "1" / "model.py")
    }
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = [TensorSpec("INPUT", "FP32", (3, 224, 224))], [TensorSpec("OUTPUT", "FP32", (10,))]
        twin = export_null_model(Path(folder), "mymodel", inputs, outputs, 8)
        for path in (twin / "config.pbtxt", twin / "1" / "model.py"):
            files[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
    future = "from __future__ import annotations\n"
    return {
        name: text.replace(future, future + found, 1) if name.endswith(".py") else text for name, text in files.items()
    }


@contextlib.contextmanager
def opened(tmp_path: Path, addresses: dict[str, str]) -> Iterator[rig.Page]:
    """A fresh folder with the project's calibrations and predictions, and a page's shell in it."""
    folder, scratch = tmp_path / "here", tmp_path / "scratch"
    for name in ("calibration", "predictions"):
        shutil.copytree(rig.ROOT / name, folder / name)
    scratch.mkdir()
    page = rig.Page(folder, scratch, addresses)
    try:
        yield page
    finally:
        page.shell.close()


def run_page(text: str, tmp_path: Path) -> rig.Page:
    with served(directive(text, "server")) as addresses, opened(tmp_path, addresses) as page:
        page.run(rig.blocks_of(text))
        return page


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.real] * is_real(text)) for name, text in PAGES.items() if "```" in text],
)
def test_what_a_page_shows_is_what_happens(name: str, tmp_path: Path, record_property: Any) -> None:
    text = PAGES[name]
    blocks = rig.blocks_of(text)
    rig.refuse_other_kinds(blocks)
    left_out = Counter(block.marks["no-run"] for block in blocks if "no-run" in block.marks)
    assert left_out == NOT_RUN.get(name, {}), "what is not run is listed in NOT_RUN"
    for program in (directive(text, "needs") or "").split():
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    page = run_page(text, tmp_path)
    record_property("commands", page.commands)
    record_property("examples", page.examples)


def test_no_reason_outlives_its_block() -> None:
    assert set(NOT_RUN) <= set(PAGES)


def parse(words: list[str]) -> None:
    """Raises ``AssertionError`` where a command or one of its options is none of ours."""
    command: Any = typer.main.get_command(app)
    words = words[1:]
    while words and getattr(command, "commands", None) is not None and not words[0].startswith("-"):
        name = words.pop(0)
        if name in {"...", "COMMAND"}:
            return
        for each in name.split("|"):
            assert each in command.commands, f"no command {each}"
        if "|" in name:
            return
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if re.match(r"--?[a-z]", word):
            for option in word.split("=")[0].split("|"):
                assert option in known | {"--help", "-h"}, f"{command.name}: no option {option}"


def inline_commands(text: str) -> Iterator[str]:
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    yield from (" ".join(each.split()) for each in re.findall(r"`(b2g [^`]+)`", outside))


@pytest.mark.parametrize("name", PAGES)
def test_commands_within_sentences_exist(name: str) -> None:
    for command in inline_commands(PAGES[name]):
        parse(shlex.split(command))


def test_a_command_that_is_none_is_seen() -> None:
    (command,) = inline_commands("Use `b2g mstar --servize 1ms`.\n```console\n$ b2g nothing\n```\n")
    with pytest.raises(AssertionError, match="no option --servize"):
        parse(shlex.split(command))
    with pytest.raises(AssertionError, match="no command nothing"):
        parse(["b2g", "nothing"])


# Negative controls: the rig sees what is wrong.

SHOWN = """\
<!-- exit: 3 -->
```console
$ cd calibration && X=7
$ echo $X \\
    b
7 b
$ (echo 1; echo 22; echo 33 of 4; exit 3)
1
...
33 ... 4
```

```python
import os
x = 1
print(x)
```
```text
1
```

```python
>>> x + 1
2
```
"""


def test_a_page_is_run(tmp_path: Path) -> None:
    page = run_page(SHOWN, tmp_path)
    assert (page.commands, page.examples) == (3, 2)


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("7 b\n", "8 b\n", "line 4: .*shown:\n  . 8 b\nseen:\n  . 7 b"),
        ("7 b\n", "", "seen:\n  . 7 b"),
        ("33 ... 4", "33 ... 5", "shown"),
        ("33 ... 4", "33 ...\nmore", "shown"),
        ("<!-- exit: 3 -->\n", "", "exit code 3, shown: .0."),
        ("cd calibration", "cd nowhere", "exit code 1, shown: .0."),
        ("echo $X", "exit", "the shell ended"),
        ("```text\n1\n", "```text\n2\n", "line 13: shown"),
        ("```text\n1\n```\n", "", "line 13: shown:\n  . .nothing.\nseen:\n  . 1"),
        (">>> x + 1\n2", ">>> x + 1\n3", "line 22: "),
        ("$ cd", "cd", "begins with a command"),
        ("```\n\n```python\nimport", "\n```python\nimport", "."),
    ],
)
def test_what_is_wrong_is_seen(right: str, wrong: str, why: str, tmp_path: Path) -> None:
    assert right in SHOWN
    with pytest.raises(rig.DocsError, match=re.compile(why, re.S)):
        run_page(SHOWN.replace(right, wrong, 1), tmp_path)


@pytest.mark.parametrize(
    "block",
    [
        "```sh\nb2g doctor\n```",
        "```bash\nls\n```",
        "```\nb2g doctor\n```",
        "```text\n$ b2g doctor\n```",
        "- a list\n\n    ```shell\n    b2g doctor\n    ```",
    ],
)
def test_commands_that_nobody_would_run_are_refused(block: str) -> None:
    with pytest.raises(rig.DocsError, match="line"):
        rig.refuse_other_kinds(rig.blocks_of(block + "\n"))
    rig.refuse_other_kinds(rig.blocks_of("<!-- no-run: needs a GPU -->\n" + block.rsplit("\n\n", 1)[-1] + "\n"))


def test_numbers_may_differ_by_a_stated_share() -> None:
    rig.assert_shown(["X = 270 request/s"], "X =  273 request/s\n", within=0.05)
    for wrong in ("X = 290 request/s", "Y = 270 request/s", "X = 270"):
        with pytest.raises(rig.DocsError):
            rig.assert_shown(["X = 270 request/s"], wrong, within=0.05)


@pytest.mark.real
def test_a_model_of_ones_own_is_served(tmp_path: Path) -> None:
    page = run_page(
        "<!-- server: own -->\n```console\n$ curl -sf localhost:8000/v2/models/mymodel/ready\n"
        "$ curl -sf localhost:8000/v2/models/mymodel_null/ready\n```\n",
        tmp_path,
    )
    assert page.commands == 2
