"""The ledger: what is frozen stays as it is, whoever writes and whenever they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import builders
import pytest

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.judge import judge
from b2gmodel.ledger import GENESIS, Ledger
from b2gmodel.records import Prediction, canonical_bytes, digest_of
from b2gmodel.store import write_record


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "predictions")


def other_prediction(number: int = 2) -> Prediction:
    return builders.prediction(builders.calibration(name=f"cal{number}"))


def freeze_two(ledger: Ledger) -> list[Path]:
    return [ledger.freeze(builders.prediction()), ledger.freeze(other_prediction())]


def test_a_frozen_prediction_is_named_by_its_digest(ledger: Ledger) -> None:
    prediction = builders.prediction()
    path = ledger.freeze(prediction)
    assert path == ledger.folder / f"cal-k8-{digest_of(prediction)}.json"
    assert path.read_bytes() == canonical_bytes(prediction)
    assert ledger.load_frozen(path) == (prediction, digest_of(prediction))


def test_the_lines_are_chained(ledger: Ledger) -> None:
    first, second = freeze_two(ledger)
    entries = ledger.entries()
    assert [(entry.event, entry.file) for entry in entries] == [("freeze", first.name), ("freeze", second.name)]
    assert [entry.previous for entry in entries] == [GENESIS, entries[0].line_digest]
    assert set(entries[0].facts) == {"at", "boot_id", "boottime_ns"}


def test_the_same_content_again_is_the_same_file_and_line(ledger: Ledger) -> None:
    path = ledger.freeze(builders.prediction())
    content = ledger.path.read_bytes()
    assert ledger.freeze(builders.prediction()) == path
    assert ledger.path.read_bytes() == content


def test_frozen_but_not_entered_is_entered_by_the_next_freeze(ledger: Ledger) -> None:
    """As after a crash between the two."""
    prediction = builders.prediction()
    path = ledger.folder / f"{prediction.name}-{digest_of(prediction)}.json"
    write_record(path, prediction)
    with pytest.raises(EvidenceError, match="not in the ledger"):
        ledger.load_frozen(path)
    assert ledger.freeze(prediction) == path
    assert ledger.load_frozen(path)[0] == prediction


def test_an_absent_ledger_is_empty(ledger: Ledger) -> None:
    assert ledger.entries() == []


class TestFinding:
    def test_by_path_or_digits(self, ledger: Ledger) -> None:
        path, _ = freeze_two(ledger)
        digest = digest_of(builders.prediction())
        assert ledger.find(str(path)) == path
        assert [ledger.find(digest[:8]), ledger.find(digest)] == [path, path]

    @pytest.mark.parametrize("text", ["", "0000000", "00000000", "nothing", "x" * 300, "a\x00b", "A" * 8])
    def test_what_is_not_there(self, ledger: Ledger, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        freeze_two(ledger)
        monkeypatch.chdir(ledger.folder)
        with pytest.raises(UsageError):
            ledger.load_frozen(ledger.find(text))


class TestTampering:
    def test_an_edited_prediction(self, ledger: Ledger) -> None:
        path = ledger.freeze(builders.prediction())
        path.write_bytes(path.read_bytes().replace(b'"m_star":3', b'"m_star":2'))
        with pytest.raises(EvidenceError, match="the prediction was changed after it was frozen"):
            ledger.load_frozen(path)

    def test_an_edited_prediction_under_another_name(self, ledger: Ledger) -> None:
        path = ledger.freeze(builders.prediction())
        renamed = path.rename(path.with_name("other.json"))
        renamed.write_bytes(renamed.read_bytes().replace(b'"m_star":3', b'"m_star":2'))
        with pytest.raises(EvidenceError, match="the prediction is not in the ledger"):
            ledger.load_frozen(renamed)

    def test_a_prediction_frozen_elsewhere(self, ledger: Ledger, tmp_path: Path) -> None:
        path = Ledger(tmp_path / "elsewhere").freeze(builders.prediction())
        with pytest.raises(EvidenceError, match="not in the ledger"):
            ledger.load_frozen(path)

    def test_what_is_no_prediction_says_so(self, ledger: Ledger, tmp_path: Path) -> None:
        path = builders.written(tmp_path, builders.calibration())
        with pytest.raises(UsageError, match="no such record"):
            ledger.load_frozen(path)

    @pytest.mark.parametrize("line", [0, 1])
    def test_a_changed_line(self, ledger: Ledger, line: int) -> None:
        freeze_two(ledger)
        ledger.freeze(other_prediction(3))
        lines = ledger.path.read_bytes().splitlines(keepends=True)
        lines[line] = lines[line].replace(b'"at":"2', b'"at":"1')
        ledger.path.write_bytes(b"".join(lines))
        with pytest.raises(EvidenceError, match=f"line {line + 2}: the ledger's chain is broken"):
            ledger.entries()

    def test_a_removed_and_a_moved_line(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        first, second = ledger.path.read_bytes().splitlines(keepends=True)
        for content in (second, second + first, first + first, first + b"\n" + second):
            ledger.path.write_bytes(content)
            with pytest.raises(EvidenceError, match=r"chain is broken|ledger is damaged"):
                ledger.entries()

    @pytest.mark.parametrize("line", [b"", b"x", b"[]", b'"x"', b"7", b"{}", b"\xff", b"[" * 100_000])
    def test_a_line_that_is_none(self, ledger: Ledger, line: bytes) -> None:
        freeze_two(ledger)
        ledger.path.write_bytes(line + b"\n" + ledger.path.read_bytes())
        with pytest.raises(EvidenceError, match="line 1: the ledger is damaged"):
            ledger.entries()

    def test_a_broken_chain_takes_no_further_line(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        broken = b"".join(ledger.path.read_bytes().splitlines(keepends=True)[1:])
        ledger.path.write_bytes(broken)
        with pytest.raises(EvidenceError):
            ledger.freeze(other_prediction(3))
        assert ledger.path.read_bytes() == broken


class TestVerdicts:
    def test_a_verdict_is_entered_once(self, ledger: Ledger) -> None:
        prediction = builders.prediction()
        ledger.freeze(prediction)
        measured = builders.measurement(prediction, {1: [320.0, 321.0], 3: [600.0, 601.0]})
        verdict = judge(prediction, measured)
        paths = {ledger.enter_verdict("measured", verdict) for _ in range(2)}
        assert len(paths) == 1
        (entry,) = [entry for entry in ledger.entries() if entry.event == "outcome"]
        assert (entry.digest, entry.file) == (digest_of(prediction), paths.pop().name)
        assert entry.facts["outcome"] == "held"
        assert entry.facts["measurement"] == digest_of(measured)

    def test_written_but_not_entered_is_entered_by_the_next(self, ledger: Ledger) -> None:
        prediction = builders.prediction()
        ledger.freeze(prediction)
        verdict = judge(prediction, builders.measurement(prediction, {1: [320.0, 321.0], 3: [600.0, 601.0]}))
        before = ledger.path.read_bytes()
        path = ledger.enter_verdict("measured", verdict)
        ledger.path.write_bytes(before)  # as after a crash between the two
        assert ledger.enter_verdict("measured", verdict) == path
        assert [entry.event for entry in ledger.entries()] == ["freeze", "outcome"]


# One process loads the package and forks a child for each source; they wait on a pipe and are let go all at once.
FREEZE = """
import os, sys
from pathlib import Path
from b2gmodel.ledger import Ledger
from b2gmodel.records import Prediction
{before}
gate, opener = os.pipe()
children = []
for source in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        os.close(opener)
        prediction = Prediction.model_validate_json(Path(source).read_bytes())
        os.read(gate, 1)
        Ledger(Path(sys.argv[1])).freeze(prediction)
        os._exit(0)
    children.append(child)
os.close(opener)
codes = [os.waitpid(child, 0)[1] for child in children]
print(codes)
"""


def freezers(ledger: Ledger, *names: str, before: str = "") -> list[str]:
    """The command that freezes, all at once, a prediction from a calibration of each name."""
    sources = [ledger.folder.parent / f"{name}.json" for name in names]
    for source in sources:
        source.write_bytes(canonical_bytes(builders.prediction(builders.calibration(name=source.stem))))
    return [sys.executable, "-c", FREEZE.format(before=before), str(ledger.folder), *map(str, sources)]


def test_twenty_processes_at_once_make_one_chain(ledger: Ledger) -> None:
    """Half of them freeze the same prediction."""
    names = [f"cal{number}" for number in range(10)] + ["same"] * 10
    done = subprocess.run(freezers(ledger, *names), capture_output=True, text=True, check=True)
    assert done.stdout == f"{[0] * 20}\n"
    files = [entry.file for entry in ledger.entries()]
    assert len(files) == len(set(files)) == 11
    assert {ledger.load_frozen(ledger.folder / file)[0].calibration_name for file in files} == set(names)


DIE = """
import os
from b2gmodel import ledger as module
class Torn:
    def __init__(self, stream): self.stream = stream
    def __enter__(self): return self
    def __exit__(self, *_): self.stream.close()
    def flush(self): self.stream.flush()
    def fileno(self): return self.stream.fileno()
    def write(self, line):
        self.stream.write(line[:len(line) // 2]); self.stream.flush()
        print(os.getpid(), flush=True); sys.stdin.read()
opened = Path.open
def tearing(path, mode="r", **rest):
    stream = opened(path, mode, **rest)
    tearing.count += path.name == "ledger.jsonl" and mode == "ab"
    return Torn(stream) if tearing.count == 2 and path.name == "ledger.jsonl" else stream
tearing.count = 0
Path.open = tearing
"""


def test_killed_in_the_middle_of_a_line_leaves_a_valid_ledger(ledger: Ledger) -> None:
    first = ledger.freeze(builders.prediction())
    whole = ledger.path.read_bytes()
    with subprocess.Popen(
        freezers(ledger, "torn", before=DIE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert process.stdout.read() == f"[{signal.SIGKILL:d}]\n".encode()
    assert len(ledger.path.read_bytes()) > len(whole)
    # Readers do not see the torn line; the next writer cuts it off, and the lock died with its holder.
    assert [entry.file for entry in ledger.entries()] == [first.name]
    second = ledger.freeze(builders.prediction(builders.calibration(name="torn")))
    assert [entry.file for entry in ledger.entries()] == [first.name, second.name]
    assert all(json.loads(line) for line in ledger.path.read_bytes().splitlines())
