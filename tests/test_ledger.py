"""The ledger: what is frozen stays as it is, whoever writes and whenever they die."""

from __future__ import annotations

import hashlib
from itertools import permutations
from pathlib import Path

import builders
import pytest

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.judge import judge
from b2gmodel.ledger import Ledger
from b2gmodel.ledger_environment import environment_digest, lock_file
from b2gmodel.ledger_lines import GENESIS, head_of
from b2gmodel.ledger_states import count_states
from b2gmodel.records import Prediction, canonical_bytes, digest_of
from b2gmodel.store import write_record


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "predictions")


def other_prediction(number: int = 2) -> Prediction:
    return builders.prediction(builders.calibration(name=f"cal{number}"))


def freeze_two(ledger: Ledger) -> list[Path]:
    return [ledger.freeze(builders.prediction()), ledger.freeze(other_prediction())]


def with_another_byte(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :]


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

    def test_changed_bytes_of_a_frozen_prediction(self, ledger: Ledger) -> None:
        """One in 37; ``benchmarks/ledger_tamper.py`` tries all."""
        path = ledger.freeze(builders.prediction())
        content = path.read_bytes()
        for position in range(0, len(content), 37):
            path.write_bytes(with_another_byte(content, position))
            with pytest.raises(EvidenceError):
                ledger.load_frozen(path)

    @pytest.mark.parametrize("file", ["path", "head_path"])
    def test_every_byte_of_the_ledger_and_its_head(self, ledger: Ledger, file: str) -> None:
        freeze_two(ledger)
        path: Path = getattr(ledger, file)
        content = path.read_bytes()
        for position in range(len(content)):
            path.write_bytes(with_another_byte(content, position))
            with pytest.raises(EvidenceError):
                ledger.entries()

    def test_every_line_deleted_repeated_or_swapped(self, ledger: Ledger) -> None:
        for number in range(4):
            ledger.freeze(other_prediction(number))
        lines = ledger.path.read_bytes().splitlines(keepends=True)
        numbers = range(len(lines))
        deleted = [[*lines[:each], *lines[each + 1 :]] for each in numbers]
        repeated = [[*lines[:at], line, *lines[at:]] for line in lines for at in range(len(lines) + 1)]
        moved = [list(order) for order in permutations(lines) if list(order) != lines]
        for wrong in (*deleted, *repeated, *moved):
            ledger.path.write_bytes(b"".join(wrong))
            with pytest.raises(EvidenceError):
                ledger.entries()
        ledger.path.write_bytes(b"".join(lines))
        assert len(ledger.entries()) == len(lines)

    @pytest.mark.parametrize("lines", [1, 2])
    @pytest.mark.parametrize("file", ["path", "head_path"])
    def test_ledger_or_head_is_gone(self, ledger: Ledger, file: str, lines: int) -> None:
        for number in range(lines):
            ledger.freeze(other_prediction(number))
        getattr(ledger, file).unlink()
        for act in (ledger.entries, lambda: ledger.freeze(builders.prediction())):
            with pytest.raises(EvidenceError, match="does not end where its head says"):
                act()

    def test_a_broken_chain_takes_no_further_line(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        broken = b"".join(ledger.path.read_bytes().splitlines(keepends=True)[1:])
        ledger.path.write_bytes(broken)
        with pytest.raises(EvidenceError):
            ledger.freeze(other_prediction(3))
        assert ledger.path.read_bytes() == broken


class TestHead:
    def test_it_holds_the_number_of_lines_and_the_last_ones_digest(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        assert ledger.head_path.read_text() == f"2 {ledger.entries()[-1].line_digest}\n"
        assert head_of([]) == b"0 " + GENESIS.encode() + b"\n"

    def test_one_behind_is_a_crash_and_is_mended(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        entries = ledger.entries()
        ledger.head_path.write_bytes(head_of(entries[:1]))
        assert ledger.entries() == entries
        ledger.freeze(builders.prediction())  # a line of it is there: nothing is appended
        assert ledger.head_path.read_bytes() == head_of(entries)

    def test_two_behind_is_not(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        ledger.head_path.write_bytes(head_of([]))
        with pytest.raises(EvidenceError):
            ledger.entries()

    def test_an_unfinished_line_is_not_there_and_is_cut_off(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        whole = ledger.path.read_bytes()
        ledger.path.write_bytes(whole + whole.splitlines()[0][:-1])
        assert len(ledger.entries()) == 2
        ledger.freeze(builders.prediction())
        assert ledger.path.read_bytes() == whole

    def test_a_last_line_that_lost_its_end_is_not_cut_off(self, ledger: Ledger) -> None:
        """The head knows it: this is no crash."""
        freeze_two(ledger)
        short = ledger.path.read_bytes()[:-1]
        ledger.path.write_bytes(short)
        with pytest.raises(EvidenceError):
            ledger.freeze(other_prediction(3))
        assert ledger.path.read_bytes() == short


class TestAbandoning:
    def test_reason_and_stage(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        digest = digest_of(builders.prediction())
        for _ in range(2):
            ledger.abandon(digest, "the server is gone")
        assert [entry.event for entry in ledger.entries()] == ["freeze", "freeze", "abandon"]
        assert [(state.stage, state.reason, state.is_open) for state in ledger.states()] == [
            ("abandoned", "the server is gone", False),
            ("frozen", None, True),
        ]
        with pytest.raises(UsageError, match="it was abandoned before: saw 'the server is gone'"):
            ledger.abandon(digest, "another reason")

    @pytest.mark.parametrize("reason", ["", " ", "two\nlines", "\udc80", "x" * 1001])
    def test_what_is_no_reason(self, ledger: Ledger, reason: str) -> None:
        freeze_two(ledger)
        with pytest.raises(UsageError, match="--reason"):
            ledger.abandon(digest_of(builders.prediction()), reason)

    def test_what_has_an_outcome_is_not_abandoned(self, ledger: Ledger) -> None:
        freeze_two(ledger)
        digest = digest_of(builders.prediction())
        ledger.note("outcome", digest, "v.json", outcome="refuted", measurement="0" * 64)
        with pytest.raises(UsageError, match="a prediction with an outcome cannot be abandoned: saw 'refuted'"):
            ledger.abandon(digest, "it was refuted")


def test_what_was_never_frozen_has_no_events(ledger: Ledger) -> None:
    freeze_two(ledger)
    for act in (lambda: ledger.note("measure", "0" * 64, "m.json"), lambda: ledger.abandon("0" * 64, "why")):
        with pytest.raises(EvidenceError, match="the prediction is not in the ledger"):
            act()


def test_an_event_names_a_file_in_its_own_folder(ledger: Ledger) -> None:
    freeze_two(ledger)
    before = ledger.path.read_bytes()
    with pytest.raises(EvidenceError, match="the ledger is damaged"):
        ledger.note("measure", digest_of(builders.prediction()), "../m.json")
    assert ledger.path.read_bytes() == before


def test_the_states_count_what_lies_in_the_drawer(ledger: Ledger) -> None:
    for number in range(4):
        ledger.freeze(other_prediction(number))
    first, second, third, _ = (state.digest for state in ledger.states())
    for digest, measurement in ((first, "a"), (second, "b"), (second, "c")):
        ledger.note("measure", digest, f"{measurement}.json", measurement=measurement)
    ledger.note("outcome", second, "v.json", outcome="held", measurement="c")
    ledger.abandon(third, "no server")
    states = ledger.states()
    assert [state.stage for state in states] == ["measured", "judged", "abandoned", "frozen"]
    assert [state.unjudged for state in states] == [("a",), ("b",), (), ()]
    assert count_states(states) == {
        "frozen": 4,
        "open": 2,
        "unmeasured": 1,
        "measured": 1,
        "judged": 1,
        "abandoned": 1,
        "unjudged_measurements": 2,
        "unfinished_measurements": 0,
    }


@pytest.mark.parametrize(
    ("lines", "unfinished"),
    [
        ("begin a", ["a"]),
        ("begin a, measure a", []),
        ("begin a, begin a, measure a", ["a"]),  # dropped, and made again under the same name
        ("begin a, begin b, measure a, begin c", ["b", "c"]),
        ("begin a, measure b", ["a"]),
        ("measure a, begin a", ["a"]),
        ("measure a", []),  # as ledgers have it that are older than beginnings
    ],
)
def test_what_was_begun_and_never_entered_stays_in_sight(ledger: Ledger, lines: str, unfinished: list[str]) -> None:
    first, second = (path.stem[-64:] for path in freeze_two(ledger))
    for line in lines.split(", "):
        event, name = line.split()
        ledger.note("begin" if event == "begin" else "measure", first, f"{name}.json")
    ledger.abandon(first, "an abandonment hides none")
    ledger.note("measure", second, "a.json")  # of another prediction
    states = ledger.states()
    assert [[begun.name for begun in state.unfinished] for state in states] == [unfinished, []]
    assert count_states(states)["unfinished_measurements"] == len(unfinished)


class TestLock:
    """Of the environment, beside the prediction that states its digest."""

    def freeze(self, ledger: Ledger, digest: str | None) -> list[str]:
        software = builders.SOFTWARE.model_copy(update={"lock_digest": digest})
        ledger.freeze(builders.prediction().model_copy(update={"software": software}))
        return [path.name for path in ledger.folder.glob("environment-*")]

    def test_it_holds_what_is_installed_under_its_digest(self, ledger: Ledger) -> None:
        assert self.freeze(ledger, environment_digest()) == [lock_file(environment_digest())]
        content = (ledger.folder / lock_file(environment_digest())).read_bytes()
        assert hashlib.sha256(content).hexdigest() == environment_digest()

    def test_it_is_never_overwritten(self, ledger: Ledger) -> None:
        ledger.folder.mkdir()
        (ledger.folder / lock_file(environment_digest())).write_text("mine")
        self.freeze(ledger, environment_digest())
        assert (ledger.folder / lock_file(environment_digest())).read_text() == "mine"

    @pytest.mark.parametrize("digest", [None, "0" * 64])
    def test_another_environment_than_the_one_here_is_not_written(self, ledger: Ledger, digest: str | None) -> None:
        assert self.freeze(ledger, digest) == []


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
        before = [path.read_bytes() for path in (ledger.path, ledger.head_path)]
        path = ledger.enter_verdict("measured", verdict)
        for file, content in zip((ledger.path, ledger.head_path), before, strict=True):
            file.write_bytes(content)  # as after a crash between the two
        assert ledger.enter_verdict("measured", verdict) == path
        assert [entry.event for entry in ledger.entries()] == ["freeze", "outcome"]
