"""Signatures by the real ssh-keygen: who signed, what was signed, and for what."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import builders
import pytest
from cli_bench import Out, complained, said

from b2gmodel import signing
from b2gmodel.errors import EvidenceError, SetupError, UsageError
from b2gmodel.ledger import Ledger
from b2gmodel.ledger_verify import signer_of
from b2gmodel.records import Prediction, digest_of
from b2gmodel.store import read_record

pytestmark = pytest.mark.real

CONTENT = b'{"record":"b2g.prediction"}'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which(signing.PROGRAM) is None:
        pytest.skip("no ssh-keygen: apt install openssh-client")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_key(name: str = "key", *options: str) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", name, *options], check=True, timeout=60
    )
    return Path(name)


def allow(key: Path, principal: str = "me@example.com", options: str = "") -> Path:
    """An allowed-signers file with one line."""
    path = Path("allowed_signers")
    path.write_text(f"{principal} {options}{key.with_suffix('.pub').read_text()}")
    return path


def test_the_signer_is_known_by_the_allowed_signers() -> None:
    signature = signing.sign(CONTENT, key := make_key())
    assert signature.content.startswith(b"-----BEGIN SSH SIGNATURE-----\n")
    listed = subprocess.run(["ssh-keygen", "-l", "-f", "key.pub"], capture_output=True, text=True, check=True)
    assert signature.signer == listed.stdout.split()[1]
    for principal, options in (
        ("me@example.com", ""),
        ("me@example.com,you@example.com", 'namespaces="b2g-prediction@b2gmodel" '),
        ("*@example.com", ""),
    ):
        found = signing.verify(CONTENT, signature.content, allow(key, principal, options))
        assert found == (principal.split(",")[0], signature.signer)


def test_a_public_key_stands_for_its_private_half() -> None:
    key = make_key()
    assert signing.sign(CONTENT, key.with_suffix(".pub")) == signing.sign(CONTENT, key)


def test_every_changed_byte_of_the_content_is_seen() -> None:
    signature = signing.sign(CONTENT, make_key())
    for position in range(0, len(CONTENT), 9):
        changed = CONTENT[:position] + b"x" + CONTENT[position + 1 :]
        with pytest.raises(EvidenceError, match="not of this content"):
            signing.fingerprint(changed, signature.content)


@pytest.mark.parametrize("damage", [lambda text: b"", lambda text: text[:-60], lambda text: text.replace(b"U", b"V")])
def test_a_damaged_signature_is_none(damage: object) -> None:
    signature = signing.sign(CONTENT, key := make_key())
    assert callable(damage)
    with pytest.raises(EvidenceError):
        signing.verify(CONTENT, damage(signature.content), allow(key))


def test_a_signature_for_another_purpose_is_none() -> None:
    key = make_key()
    other = subprocess.run(
        ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", "git"], input=CONTENT, capture_output=True, check=True
    )
    with pytest.raises(EvidenceError, match="not of this content"):
        signing.verify(CONTENT, other.stdout, allow(key))


@pytest.mark.parametrize("options", ['namespaces="git" ', 'valid-before="20200101" '])
def test_a_key_that_may_not_sign_predictions(options: str) -> None:
    signature = signing.sign(CONTENT, key := make_key())
    with pytest.raises(EvidenceError, match="may not sign predictions"):
        signing.verify(CONTENT, signature.content, allow(key, options=options))
    with pytest.raises(EvidenceError, match="may not sign predictions"):
        signing.verify(CONTENT, signature.content, allow(make_key("other")))
    Path("allowed_signers").write_text("nonsense\n")
    with pytest.raises(EvidenceError, match="may not sign predictions"):
        signing.verify(CONTENT, signature.content, Path("allowed_signers"))


def test_files_that_are_no_keys() -> None:
    Path("text").write_text("x")
    for key, line in ((Path("text"), "text: the key does not sign"), (Path("none"), "--sign: cannot read the file")):
        with pytest.raises(UsageError, match=line):
            signing.sign(CONTENT, key)
    signature = signing.sign(CONTENT, make_key())
    with pytest.raises(UsageError, match="--allowed-signers: cannot read the file"):
        signing.verify(CONTENT, signature.content, Path("none"))


def test_without_ssh_keygen(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    builders.written(Path(), builders.calibration())
    monkeypatch.setattr(signing, "PROGRAM", "no-such-ssh-keygen")
    Path("key").write_text("")
    with pytest.raises(SetupError):
        signing.check_program()
    code, line = complained(capsys, "predict", "cal.json", "--analytic", "--sign", "key")
    assert (code, line) == (
        2,
        "no-such-ssh-keygen: signatures need ssh-keygen: saw 'No such file or directory'; install OpenSSH's client, on "
        "Debian and Ubuntu: apt install openssh-client",
    )
    assert not Path("predictions").exists()


class TestInTheLedger:
    @pytest.fixture
    def ledger(self) -> Ledger:
        return Ledger(Path("predictions"))

    def test_signed_and_entered_once(self, ledger: Ledger) -> None:
        path, key = ledger.freeze(builders.prediction()), make_key()
        signature = ledger.sign(path, key)
        assert signature.name == f"{path.name}.sig"
        assert ledger.sign(path, key) == signature
        assert [(entry.event, entry.file) for entry in ledger.entries()] == [
            ("freeze", path.name),
            ("sign", signature.name),
        ]
        digest = digest_of(builders.prediction())
        assert signer_of(ledger, digest, allow(key)) == "me@example.com"
        assert ledger.states()[0].signer == ledger.entries()[1].facts["signer"]
        # It is an ordinary signature of the file: ssh-keygen alone checks it.
        verify = [
            "-Y",
            "verify",
            "-f",
            "allowed_signers",
            "-I",
            "me@example.com",
            "-n",
            "b2g-prediction@b2gmodel",
            "-s",
        ]
        subprocess.run(
            ["ssh-keygen", *verify, str(signature)], input=path.read_bytes(), check=True, capture_output=True
        )

    def test_what_a_crash_left_of_a_signature_is_replaced(self, ledger: Ledger) -> None:
        path, key = ledger.freeze(builders.prediction()), make_key()
        path.with_name(f"{path.name}.sig").write_text("left by a crash")
        ledger.sign(path, key)
        assert signer_of(ledger, digest_of(builders.prediction()), allow(key)) == "me@example.com"

    def test_a_second_key_is_refused(self, ledger: Ledger) -> None:
        path = ledger.freeze(builders.prediction())
        ledger.sign(path, make_key())
        with pytest.raises(UsageError, match="another key has signed this prediction"):
            ledger.sign(path, make_key("other"))
        assert len(ledger.entries()) == 2

    def test_what_is_not_frozen_is_not_signed(self, ledger: Ledger) -> None:
        path = ledger.freeze(builders.prediction())
        path.write_bytes(path.read_bytes().replace(b'"m_star":3', b'"m_star":2'))
        with pytest.raises(EvidenceError, match="changed after it was frozen"):
            ledger.sign(path, make_key())

    def test_who_signed_must_be_shown(self, ledger: Ledger) -> None:
        path, key = ledger.freeze(builders.prediction()), make_key()
        digest, allowed = digest_of(builders.prediction()), allow(key)
        with pytest.raises(EvidenceError, match="the prediction is not signed"):
            signer_of(ledger, digest, allowed)
        with pytest.raises(EvidenceError, match="not in the ledger"):
            signer_of(ledger, "0" * 64, allowed)
        signature = ledger.sign(path, key)
        content = signature.read_bytes()
        signature.write_bytes(content.replace(b"\n", b"\r\n"))
        with pytest.raises(EvidenceError, match="the file was changed"):
            signer_of(ledger, digest, allowed)
        signature.unlink()
        with pytest.raises(EvidenceError, match="the file is not there"):
            signer_of(ledger, digest, allowed)
        signature.write_bytes(content)
        with pytest.raises(EvidenceError, match="may not sign predictions"):
            signer_of(ledger, digest, allow(make_key("other")))
        assert signer_of(ledger, digest, allow(key)) == "me@example.com"


class TestPredictSign:
    def test_it_is_said_and_the_same_again_changes_nothing(self, capsys: Out) -> None:
        builders.written(Path(), builders.calibration())
        make_key()
        command = ["predict", "cal.json", "--analytic", "--sign", "key"]
        _, out = said(capsys, *command)
        before = {path.name: path.read_bytes() for path in Path("predictions").iterdir()}
        frozen, signed, _ = out.splitlines()[-3:]
        assert signed == f"signed: {frozen.removeprefix('frozen: ')}.sig"
        assert said(capsys, *command) == (0, out)
        assert {path.name: path.read_bytes() for path in Path("predictions").iterdir()} == before

    def test_a_prediction_frozen_before_is_signed_later(self, capsys: Out) -> None:
        builders.written(Path(), builders.calibration())
        make_key()
        for more in ([], ["--sign", "key"]):
            said(capsys, "predict", "cal.json", "--analytic", *more)
        assert [entry.event for entry in Ledger(Path("predictions")).entries()] == ["freeze", "sign"]

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (["--sign", "none"], "--sign: cannot read the file: saw 'none'"),
            (["--sign", "cal.json", "--what-if", "k=16"], "--sign: a what-if is not frozen"),
        ],
    )
    def test_mistyped(self, capsys: Out, options: list[str], line: str) -> None:
        builders.written(Path(), builders.calibration())
        code, seen = complained(capsys, "predict", "cal.json", "--analytic", *options)
        assert (code, seen.startswith(line)) == (2, True)
        assert not Path("predictions").exists()


class TestValidate:
    """`b2g validate --allowed-signers`: who signed is said, and what is not signed by one of them is refused."""

    CURVE = {1: [320.0, 321.0, 322.0], 3: [690.0, 700.0, 695.0]}  # noqa: RUF012

    def frozen(self, here: Path, *options: str) -> str:
        builders.written(here, builders.calibration())
        _, out = said_json("predict", "cal.json", "--analytic", "--flights", "1,3", "--json", *options)
        made = read_record(Path(out["file"]), Prediction)
        builders.written(here, builders.measurement(made, self.CURVE))
        return str(out["digest"])

    def test_the_signer_is_named(self, here: Path) -> None:
        digest = self.frozen(here, "--sign", str(key := make_key()))
        _, out = said_json("validate", digest, "measured.json", "--allowed-signers", str(allow(key)), "--json")
        assert out["signer"] == "me@example.com"

    def test_unsigned_is_refused(self, capsys: Out, here: Path) -> None:
        digest = self.frozen(here)
        signers = str(allow(make_key()))
        code, seen = complained(capsys, "validate", digest, "measured.json", "--allowed-signers", signers)
        assert (code, "not signed" in seen) == (3, True)

    def test_another_key_is_refused(self, capsys: Out, here: Path) -> None:
        digest = self.frozen(here, "--sign", str(make_key()))
        signers = str(allow(make_key("other")))
        code, _ = complained(capsys, "validate", digest, "measured.json", "--allowed-signers", signers)
        assert code == 3


def said_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON answer of a command run in a process of its own."""
    command = [sys.executable, "-m", "b2gmodel", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)
