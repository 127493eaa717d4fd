"""What docs/preregistration.md shows is run as it stands there, except what needs a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from b2gmodel.ledger import Ledger
from b2gmodel.ledger_environment import lock_file
from b2gmodel.ledger_verify import verify
from b2gmodel.signing import NAMESPACE

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "preregistration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.real
def test_what_the_document_shows(tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen: apt install openssh-client")
    (tmp_path / "calibration").symlink_to(ROOT / "calibration")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "b2g"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m b2gmodel "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    script = "set -euxo pipefail\n" + "".join(BLOCKS)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "  passed       signatures: 2 predictions signed by me@example.com" in done.stdout
    assert done.stdout.count(f'Good "{NAMESPACE}" signature for me@example.com') == 2
    ledger = Ledger(tmp_path / "predictions")
    assert [entry.event for entry in ledger.entries()] == ["freeze", "sign", "freeze", "sign", "abandon"]
    # The digests that sha256sum prints are the files' names, what the predictions state, and the chain's.
    lock = ledger.load_frozen(ledger.folder / ledger.entries()[0].file)[0].software.lock_digest
    assert f"{lock}  predictions/{lock_file(lock)}\n" in done.stdout
    assert "  passed       environments: 1 lock as frozen\n" in done.stdout
    first, second = ledger.entries()[:2]
    assert f"{first.digest}  predictions/{first.file}\n" in done.stdout
    assert f"{second.previous}  -\n" in done.stdout


def test_the_document_names_every_check_and_event(tmp_path: Path) -> None:
    head = tmp_path / "ledger.head"
    head.write_text("x")
    for check in verify(Ledger(tmp_path)).checks:
        assert f"\n| {check.name} | " in DOCUMENT
    assert "`freeze`, `sign`, `begin`, `measure`, `outcome`, `abandon`" in DOCUMENT
    assert len(BLOCKS) == 6
