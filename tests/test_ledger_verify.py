"""`b2g ledger`: what it checks from the files alone, with a planted fault for each check, and what it says."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import builders
import pytest
from cli_bench import MEASURED, Out, complained, said

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.judge import judge
from b2gmodel.ledger import Ledger, boot_id
from b2gmodel.ledger_environment import environment_digest, lock_file
from b2gmodel.ledger_lines import Entry, head_of, parse_lines
from b2gmodel.ledger_verify import LedgerCheck, verify
from b2gmodel.records import Measurement, Prediction, digest_of
from b2gmodel.store import write_record, write_table

NAMES = ["chain", "head", "order", "predictions", "environments", "measurements", "raw-files", "verdicts", "signatures"]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Two frozen predictions; the first was measured and judged."""
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(Path("predictions"))
    prediction = builders.prediction()
    ledger.freeze(prediction)
    ledger.freeze(builders.prediction(builders.calibration(name="second")))
    enter(ledger, prediction)
    return ledger


def enter(ledger: Ledger, prediction: Prediction, *, judged: bool = True, **changes: object) -> Measurement:
    """A measurement with its raw file, entered and judged; its sessions began just now."""
    raw = write_table(ledger.folder / "measured.parquet", {"cycle_ns": [1, 2]})
    measured = builders.measurement(prediction, MEASURED, **{"raw": raw} | changes)
    begin_ns = max(entry.boottime_ns for entry in ledger.entries()) + 1
    sessions = [
        session.model_copy(update={"boot_id": boot_id(), "begin_boottime_ns": str(begin_ns + number)})
        for number, session in enumerate(measured.sessions)
    ]
    measured = measured.model_copy(update={"sessions": tuple(sessions)})
    write_record(ledger.folder / "measured.json", measured)
    ledger.note("measure", digest_of(prediction), "measured.json", measurement=digest_of(measured))
    if judged:
        ledger.enter_verdict("measured", judge(prediction, measured))
    return measured


def rebuilt(ledger: Ledger, change: Callable[[list[dict[str, str]]], None]) -> None:
    """The ledger of an operator who changes its lines, and makes chain and head anew."""
    lines = [json.loads(line) for line in ledger.path.read_bytes().splitlines()]
    change(lines)
    previous, written = "0" * 64, []
    for line in lines:
        content = json.dumps(line | {"previous": previous}, sort_keys=True, separators=(",", ":")).encode()
        previous = hashlib.sha256(content).hexdigest()
        written.append(content + b"\n")
    ledger.path.write_bytes(b"".join(written))
    ledger.head_path.write_bytes(head_of(parse_lines(b"".join(written), "")))


def file_of(ledger: Ledger, event: str) -> Path:
    return ledger.folder / next(entry.file for entry in ledger.entries() if entry.event == event)


def failed(ledger: Ledger) -> tuple[str, ...]:
    return verify(ledger).failed


def test_a_sound_ledger_holds(ledger: Ledger) -> None:
    verification = verify(ledger)
    assert [(check.name, check.outcome) for check in verification.checks] == [
        (name, "not checked" if name in {"environments", "signatures"} else "passed") for name in NAMES
    ]
    assert (verification.holds, verification.lines, verification.strays) == (True, 4, ())
    verification.require()
    assert [check.observed for check in verification.checks][2:7] == [
        "each event after its freezing, by line and by the clock of each boot; 2 sessions timed",
        "2 predictions as frozen",
        "0 locks as frozen; 2 predictions without one",
        "1 measurement as entered",
        "1 file as measured",
    ]


class TestPlantedFaults:
    """Each check is made to fail, alone where its subject is its own."""

    def test_chain(self, ledger: Ledger) -> None:
        lines = ledger.path.read_bytes().splitlines(keepends=True)
        ledger.path.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
        verification = verify(ledger)
        assert verification.failed == ("chain",)
        assert {check.outcome for check in verification.checks[1:]} == {"not checked"}
        with pytest.raises(EvidenceError, match="the ledger fails its check chain"):
            verification.require()

    def test_head(self, ledger: Ledger) -> None:
        ledger.path.write_bytes(b"".join(ledger.path.read_bytes().splitlines(keepends=True)[:-1]))
        assert failed(ledger) == ("head",)

    def test_a_prediction(self, ledger: Ledger) -> None:
        path = file_of(ledger, "freeze")
        path.write_bytes(path.read_bytes().replace(b'"m_star":3', b'"m_star":2'))
        assert failed(ledger) == ("predictions",)
        path.unlink()
        assert failed(ledger) == ("predictions",)

    def test_a_measurement(self, ledger: Ledger) -> None:
        path = file_of(ledger, "measure")
        path.write_bytes(path.read_bytes().replace(b'"source":"test"', b'"source":"tesu"'))
        assert failed(ledger) == ("measurements",)
        path.unlink()
        assert failed(ledger) == ("measurements",)

    def test_a_measurement_of_another_prediction(self, ledger: Ledger) -> None:
        def change(lines: list[dict[str, str]]) -> None:
            lines[2]["digest"] = lines[1]["digest"]

        rebuilt(ledger, change)
        assert failed(ledger) == ("measurements",)

    def test_a_measurement_without_a_digest(self, ledger: Ledger) -> None:
        rebuilt(ledger, lambda lines: lines[2].__delitem__("measurement"))
        assert failed(ledger) == ("measurements",)

    def test_a_raw_file(self, ledger: Ledger) -> None:
        path = ledger.folder / "measured.parquet"
        path.write_bytes(path.read_bytes() + b"\n")
        assert failed(ledger) == ("raw-files",)

    def test_an_absent_raw_file_is_no_fault_and_is_said(self, ledger: Ledger) -> None:
        (ledger.folder / "measured.parquet").unlink()
        check = verify(ledger).checks[NAMES.index("raw-files")]
        assert (check.outcome, check.observed) == (
            "not checked",
            "0 files as measured; not here: measured.parquet",
        )

    def test_a_raw_file_elsewhere(self, tmp_path: Path) -> None:
        ledger, prediction = Ledger(tmp_path / "predictions"), builders.prediction()
        ledger.freeze(prediction)
        raw = write_table(tmp_path / "x.parquet", {"x": [1]})
        enter(ledger, prediction, judged=False, raw=raw.model_copy(update={"file": "../x.parquet"}))
        assert failed(ledger) == ("raw-files",)

    def test_a_verdict(self, ledger: Ledger) -> None:
        path = file_of(ledger, "outcome")
        path.write_bytes(path.read_bytes() + b" ")
        assert failed(ledger) == ("verdicts",)
        path.unlink()
        assert failed(ledger) == ("verdicts",)

    def test_an_outcome_that_the_verdict_does_not_state(self, ledger: Ledger) -> None:
        def change(lines: list[dict[str, str]]) -> None:
            lines[3]["outcome"] = {"held": "refuted"}.get(lines[3]["outcome"], "held")

        rebuilt(ledger, change)
        assert failed(ledger) == ("verdicts",)

    @pytest.mark.parametrize(
        ("change", "seen"),
        [
            (lambda lines: lines.insert(2, lines.pop(0)), "line 2: measure before its prediction was frozen"),
            (
                lambda lines: lines.insert(0, lines[0] | {"event": "begin", "file": "m.json"}),
                "line 1: begin before its prediction was frozen",
            ),
            (lambda lines: lines.insert(1, lines[0]), "line 2: frozen a second time"),
            (lambda lines: lines[1].update(boottime_ns="1"), "line 2: earlier than the line before"),
            (lambda lines: lines[2].update(boottime_ns="1"), "session 1 of measured.json began after the measurement"),
            (
                lambda lines: [line.update(boottime_ns=str(10**18 + n)) for n, line in enumerate(lines)],
                "session 1 of measured.json began before the prediction was frozen",
            ),
        ],
    )
    def test_order(self, ledger: Ledger, change: Callable[[list[dict[str, str]]], None], seen: str) -> None:
        rebuilt(ledger, change)
        verification = verify(ledger)
        assert verification.failed == ("order",)
        assert seen in verification.checks[2].observed

    def test_clocks_of_two_boots_are_not_compared(self, ledger: Ledger) -> None:
        rebuilt(ledger, lambda lines: lines[1].update(boottime_ns="1", boot_id="another"))
        assert failed(ledger) == ()

    def test_a_record_that_is_not_in_the_ledger_is_a_note(self, ledger: Ledger) -> None:
        """A crash between the writing and the entry leaves one; a measurement that was kept out looks the same."""
        builders.written(ledger.folder, builders.measurement(builders.prediction(), MEASURED, name="kept-out"))
        assert (verify(ledger).failed, verify(ledger).strays) == ((), ("kept-out.json",))

    def test_a_measurement_that_was_begun_is_not_entered_by_that(self, ledger: Ledger) -> None:
        builders.written(ledger.folder, builders.measurement(builders.prediction(), MEASURED, name="kept-out"))
        ledger.note("begin", digest_of(builders.prediction()), "kept-out.json")
        assert (verify(ledger).failed, verify(ledger).strays) == ((), ("kept-out.json",))


class TestEnvironments:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """The lock beside a prediction that states it."""
        software = builders.SOFTWARE.model_copy(update={"lock_digest": environment_digest()})
        Ledger(tmp_path).freeze(builders.prediction().model_copy(update={"software": software}))
        return tmp_path / lock_file(environment_digest())

    def seen(self, path: Path) -> LedgerCheck:
        return verify(Ledger(path.parent)).checks[NAMES.index("environments")]

    def test_a_lock_as_frozen(self, path: Path) -> None:
        assert self.seen(path) == LedgerCheck("environments", "passed", "1 lock as frozen")

    def test_an_absent_lock_is_no_fault_and_is_said(self, path: Path) -> None:
        path.unlink()
        told = f"0 locks as frozen; not here: {path.name}"
        assert self.seen(path) == LedgerCheck("environments", "not checked", told)

    def test_a_changed_lock(self, path: Path) -> None:
        """Said once, however many predictions state it."""
        ledger, content = Ledger(path.parent), path.read_bytes()
        software = builders.SOFTWARE.model_copy(update={"lock_digest": environment_digest()})
        second = builders.prediction(builders.calibration(name="second"))
        ledger.freeze(second.model_copy(update={"software": software}))
        for changed in (content + b"one-more==1\n", content[1:], b""):
            path.write_bytes(changed)
            told = f"saw {hashlib.sha256(changed).hexdigest()}; allowed: {environment_digest()}"
            assert self.seen(path) == LedgerCheck(
                "environments", "failed", f"{path.name}: the file was changed: {told}"
            )
            assert failed(ledger) == ("environments",)


@pytest.mark.real
class TestSignatures:
    @pytest.fixture
    def allowed(self, ledger: Ledger) -> Path:
        """The first prediction is signed."""
        if shutil.which("ssh-keygen") is None:
            pytest.skip("no ssh-keygen: apt install openssh-client")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], check=True)
        ledger.sign(file_of(ledger, "freeze"), Path("key"))
        Path("allowed").write_text(f"me@example.com {Path('key.pub').read_text()}")
        return Path("allowed")

    def test_all_must_be_signed_where_signers_are_named(self, ledger: Ledger, allowed: Path) -> None:
        assert verify(ledger).checks[-1].outcome == "not checked"
        assert verify(ledger, allowed).failed == ("signatures",)
        ledger.sign(ledger.folder / ledger.entries()[1].file, Path("key"))
        check = verify(ledger, allowed).checks[-1]
        assert (check.outcome, check.observed) == ("passed", "2 predictions signed by me@example.com")

    def test_a_changed_signature(self, ledger: Ledger, allowed: Path) -> None:
        path = file_of(ledger, "sign")
        path.write_bytes(path.read_bytes() + b"\n")
        assert failed(ledger) == ("signatures",)

    def test_a_signature_of_another_prediction(self, ledger: Ledger, allowed: Path) -> None:
        """Moved by an operator who rebuilds the chain, but has not the key."""

        def change(lines: list[dict[str, str]]) -> None:
            lines[-1]["digest"] = lines[1]["digest"]

        rebuilt(ledger, change)
        assert "the signature is not of this content" in verify(ledger, allowed).checks[-1].observed

    def test_a_signer_that_is_not_the_one_entered(self, ledger: Ledger, allowed: Path) -> None:
        rebuilt(ledger, lambda lines: lines[-1].update(signer="SHA256:x"))
        assert "another key signed than the ledger says" in verify(ledger, allowed).checks[-1].observed


class TestCommands:
    def test_verify_whole(self, ledger: Ledger, capsys: Out) -> None:
        code, out = said(capsys, "ledger", "verify")
        assert code == 0
        assert out.splitlines() == [
            "the ledger holds: 4 lines, no check failed",
            "  passed       chain: 4 lines, each with the digest of the line before",
            "  passed       head: ends at line 4",
            "  passed       order: each event after its freezing, by line and by the clock of each boot; "
            "2 sessions timed",
            "  passed       predictions: 2 predictions as frozen",
            "  not checked  environments: 0 locks as frozen; 2 predictions without one",
            "  passed       measurements: 1 measurement as entered",
            "  passed       raw-files: 1 file as measured",
            "  passed       verdicts: 1 verdict as entered",
            "  not checked  signatures: 0 of 2 predictions signed; by whom: --allowed-signers FILE",
            "next: docs/preregistration.md says what this proves, and what it cannot",
        ]

    def test_verify_that_fails(self, ledger: Ledger, capsys: Out) -> None:
        file_of(ledger, "measure").unlink()
        code, out = said(capsys, "ledger", "verify")
        lines = out.splitlines()
        assert (code, lines[0]) == (3, "the ledger does not hold: measurements failed")
        assert (
            "  failed       measurements: measured.json: the file is not there: saw No such file or directory" in lines
        )
        code, out = said(capsys, "ledger", "verify", "--json")
        answer = json.loads(out)
        assert (code, answer["holds"], answer["failed"]) == (3, False, ["measurements"])

    def test_a_strangers_copy_says_the_same(self, ledger: Ledger, capsys: Out, tmp_path: Path) -> None:
        """Files only, another folder, nothing written."""
        here = said(capsys, "ledger", "verify", "--json")
        copy = tmp_path / "copy" / "elsewhere"
        shutil.copytree(ledger.folder, copy)
        before = {path.name: path.read_bytes() for path in copy.iterdir()}
        assert said(capsys, "ledger", "verify", "--predictions", str(copy), "--json") == here
        assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
        file_of(ledger, "measure").unlink()
        (copy / "measured.json").unlink()
        failing = said(capsys, "ledger", "verify", "--json")
        assert failing == said(capsys, "ledger", "verify", "--predictions", str(copy), "--json")

    def test_no_ledger(self, capsys: Out, tmp_path: Path) -> None:
        code, line = complained(capsys, "ledger", "verify", "--predictions", str(tmp_path / "none"))
        assert (code, "there is no ledger here" in line) == (2, True)
        with pytest.raises(UsageError):
            verify(Ledger(tmp_path))
        assert not (tmp_path / "none").exists()

    def test_no_such_allowed_signers(self, ledger: Ledger, capsys: Out) -> None:
        code, line = complained(capsys, "ledger", "verify", "--allowed-signers", "none")
        assert (code, line.startswith("--allowed-signers: cannot read the file: saw 'none'")) == (2, True)

    def test_status_whole(self, ledger: Ledger, capsys: Out) -> None:
        second = ledger.entries()[1]
        code, out = said(capsys, "ledger", "status")
        assert code == 0
        assert out.splitlines() == [
            "1 of 2 frozen predictions without an outcome",
            "  judged 1, abandoned 0, measured and not judged 0, not measured 1",
            f"  {'without an outcome':<{len(second.file)}}   stage                  frozen at",
            f"  {second.file}  frozen  {second.facts['at']}",
            f"next: measure and validate {second.digest[:8]}, or b2g ledger abandon {second.digest[:8]} --reason TEXT",
        ]

    def test_status_counts_and_lists_what_was_begun(self, ledger: Ledger, capsys: Out) -> None:
        first, second = ledger.entries()[:2]
        for of, name in ((first, "again"), (second, "gone")):
            ledger.note("begin", of.digest, f"{name}.json")
        begun = ledger.entries()[-2:]
        _, out = said(capsys, "ledger", "status")
        assert out.splitlines() == [
            "1 of 2 frozen predictions without an outcome",
            "  judged 1, abandoned 0, measured and not judged 0, not measured 1",
            "  measurements begun and not finished: 2",
            f"  {'without an outcome':<{len(second.file)}}   stage                  frozen at",
            f"  {second.file}  frozen  {second.facts['at']}",
            f"begun and not finished: again, begun at {begun[0].facts['at']}, of {first.file}",
            f"begun and not finished: gone, begun at {begun[1].facts['at']}, of {second.file}",
            f"next: measure and validate {second.digest[:8]}, or b2g ledger abandon {second.digest[:8]} --reason TEXT",
        ]
        answer = json.loads(said(capsys, "ledger", "status", "--json")[1])
        assert answer["counts"]["unfinished_measurements"] == 2
        assert [each["unfinished"] for each in answer["predictions"]] == [
            [{"name": "again", "at": begun[0].facts["at"]}],
            [{"name": "gone", "at": begun[1].facts["at"]}],
        ]

    def test_status_json_and_abandon(self, ledger: Ledger, capsys: Out) -> None:
        second = ledger.entries()[1]
        code, out = said(capsys, "ledger", "abandon", second.digest[:8], "--reason", "no server")
        assert (code, out.splitlines()[:2]) == (0, [f"abandoned: {second.file}", "  reason: no server"])
        assert said(capsys, "ledger", "status") == (
            0,
            "0 of 2 frozen predictions without an outcome\n"
            "  judged 1, abandoned 1, measured and not judged 0, not measured 0\n"
            f"abandoned {second.file}: no server\n"
            "next: b2g ledger verify checks it all\n",
        )
        _, out = said(capsys, "ledger", "status", "--json")
        answer = json.loads(out)
        assert answer["counts"] == {
            "abandoned": 1,
            "frozen": 2,
            "judged": 1,
            "measured": 0,
            "open": 0,
            "unfinished_measurements": 0,
            "unjudged_measurements": 0,
            "unmeasured": 0,
        }
        assert [each["stage"] for each in answer["predictions"]] == ["judged", "abandoned"]

    def test_abandon_needs_a_reason(self, ledger: Ledger, capsys: Out) -> None:
        digits = ledger.entries()[1].digest[:8]
        assert complained(capsys, "ledger", "abandon", digits) == (2, "Missing option '--reason'.")
        code, line = complained(capsys, "ledger", "abandon", digits, "--reason", " ")
        assert (code, line.startswith("--reason: this cannot be a reason: saw ' '")) == (2, True)


def test_an_empty_status_says_so(capsys: Out, tmp_path: Path) -> None:
    code, out = said(capsys, "ledger", "status", "--predictions", str(tmp_path))
    assert (code, out.splitlines()[0]) == (0, "0 of 0 frozen predictions without an outcome")
    assert list(tmp_path.iterdir()) == []


def test_an_entry_knows_its_clock(ledger: Ledger) -> None:
    entry: Entry = ledger.entries()[0]
    assert (entry.boot_id, entry.boottime_ns > 0) == (boot_id(), True)
