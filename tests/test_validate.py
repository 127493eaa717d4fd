"""`b2g validate` on a stranger's copy, on evidence that fails, and over everything that was ever frozen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import builders
import pytest
from cli_bench import MEASURED, Out, complained, said

from b2gmodel.ledger import Ledger
from b2gmodel.records import Prediction, digest_of
from b2gmodel.store import write_record


def entered(folder: Path, of: Prediction, curve: dict[int, list[float]], name: str) -> None:
    """A measurement of a frozen prediction, as `b2g measure` leaves it."""
    measured = builders.measurement(of, curve, name=name)
    path = write_record(folder / f"{name}.json", measured)
    Ledger(folder).note("measure", digest_of(of), path.name, measurement=digest_of(measured))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def others(number: int) -> Prediction:
    return builders.prediction(builders.calibration(name=f"other{number}"))


def test_a_copy_in_another_folder_gives_the_same_answer_byte_for_byte(
    capsys: Out, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.frozen(Path("predictions"))
    entered(
        Path("predictions"), builders.prediction(), {m: [*x, x[0], x[1], x[0] + 1] for m, x in MEASURED.items()}, "m"
    )
    copy = tmp_path / "a stranger's" / "copy"
    shutil.copytree(here, copy)
    digits = digest_of(builders.prediction())[:8]
    mine = said(capsys, "validate", digits, "--json")
    assert mine[0] == 0
    assert said(capsys, "validate", digits, "--predictions", str(copy / "predictions"), "--json") == mine
    monkeypatch.chdir(copy)
    assert said(capsys, "validate", digits, "--json") == mine
    assert said(capsys, "validate", "--all", "--json") == said(
        capsys, "validate", "--all", "--predictions", str(here / "predictions"), "--json"
    )


def test_evidence_that_fails_is_named(capsys: Out, here: Path) -> None:
    path = builders.frozen(Path("predictions"))
    measured = builders.measurement(builders.prediction(), MEASURED)
    first = measured.sessions[0].model_copy(update={"session_id": "s0"})
    builders.written(here, measured.model_copy(update={"sessions": (first, *measured.sessions[1:])}))
    code, out = said(capsys, "validate", str(path), "measured.json")
    assert code == 3
    lines = out.splitlines()
    assert lines[0] == (
        "invalid: The evidence fails, and nothing is judged. sessions are new: session s0 was in the calibration, "
        "allowed: none of the calibration's, none twice."
    )
    assert sum(line.startswith("  failed ") for line in lines) == 1
    assert not any(line.startswith("  held ") for line in lines)
    assert lines[-1] == "next: mend what failed, and measure the frozen prediction again: b2g measure"


class TestAll:
    def test_an_empty_ledger(self, capsys: Out, here: Path) -> None:
        code, out = said(capsys, "validate", "--all")
        assert (code, out) == (
            0,
            "0 of 0 frozen predictions have no outcome; verdicts: 0 held, 0 refuted, 0 inconclusive, 0 invalid\n",
        )

    def test_the_file_drawer_comes_first(self, capsys: Out, here: Path) -> None:
        folder, ledger = Path("predictions"), Ledger(Path("predictions"))
        made = [others(number) for number in range(4)]
        for each in made:
            ledger.freeze(each)
        entered(folder, made[0], MEASURED, "good")
        entered(folder, made[1], {1: [320.0, 321.0], 3: [500.0, 501.0], 4: [700.0, 701.0]}, "bad")
        ledger.abandon(digest_of(made[2]), "the server was sold")
        for each in made[:2]:
            said(capsys, "validate", digest_of(each)[:8])
        code, out = said(capsys, "validate", "--all")
        lines = out.splitlines()
        assert code == 0
        assert lines[:2] == [
            "1 of 4 frozen predictions have no outcome, 1 abandoned; verdicts: 1 held, 1 refuted, 0 inconclusive, "
            "0 invalid",
            f"  without outcome: {digest_of(made[3])}",
        ]
        answer = json.loads(said(capsys, "validate", "--all", "--json")[1])
        assert answer["outcomes"] == {"held": 1, "refuted": 1, "inconclusive": 0, "invalid": 0}
        assert answer["without_outcome"] == [digest_of(made[3])]
        assert answer["abandoned"] == [digest_of(made[2])]
        closed = next(each for each in answer["predictors"] if each["predictor"] == "closed-form")
        assert (closed["points"], closed["coverage"] is None) == (5, False)

    def test_measurements_that_were_begun_and_never_finished(self, capsys: Out, here: Path) -> None:
        ledger, digest = Ledger(Path("predictions")), digest_of(others(0))
        ledger.freeze(others(0))
        for name in ("first", "second"):
            ledger.note("begin", digest, f"{name}.json")
        code, out = said(capsys, "validate", "--all")
        assert (code, out.splitlines()) == (
            0,
            [
                "1 of 1 frozen prediction has no outcome, measurements begun and not finished: 2; verdicts: 0 held, "
                "0 refuted, 0 inconclusive, 0 invalid",
                f"  without outcome: {digest}",
                "  begun and not finished: first",
                "  begun and not finished: second",
                f"next: b2g measure {digest[:8]}, then b2g validate {digest[:8]}",
            ],
        )
        assert json.loads(said(capsys, "validate", "--all", "--json")[1])["unfinished"] == ["first", "second"]

    def test_the_same_measurement_counts_once(self, capsys: Out, here: Path) -> None:
        builders.frozen(Path("predictions"))
        entered(Path("predictions"), builders.prediction(), MEASURED, "m")
        for _ in range(2):
            said(capsys, "validate", digest_of(builders.prediction())[:8])
        assert json.loads(said(capsys, "validate", "--all", "--json")[1])["outcomes"]["held"] == 1

    def test_a_verdict_that_was_replaced(self, capsys: Out, here: Path) -> None:
        builders.frozen(Path("predictions"))
        entered(Path("predictions"), builders.prediction(), MEASURED, "m")
        said(capsys, "validate", digest_of(builders.prediction())[:8])
        (file,) = Path("predictions").glob("m-verdict-*.json")
        file.write_bytes(file.read_bytes().replace(b'"m_star":3', b'"m_star":4'))
        code, seen = complained(capsys, "validate", "--all")
        assert code == 3
        assert seen.startswith(f"{file.name}: the verdict is not the one that was entered")

    def test_it_names_no_prediction(self, capsys: Out, here: Path) -> None:
        code, seen = complained(capsys, "validate", "deadbeef", "--all")
        assert (code, seen) == (2, "--all: --all is about every prediction in the ledger; name none with it")
