"""docs/preregistration.md names every check and event; what it shows is run by test_docs.py."""

from __future__ import annotations

from pathlib import Path

from b2gmodel.ledger import Ledger
from b2gmodel.ledger_verify import verify

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "preregistration.md").read_text(encoding="utf-8")


def test_the_document_names_every_check_and_event(tmp_path: Path) -> None:
    head = tmp_path / "ledger.head"
    head.write_text("x")
    for check in verify(Ledger(tmp_path)).checks:
        assert f"\n| {check.name} | " in DOCUMENT
    assert "`freeze`, `sign`, `begin`, `measure`, `outcome`, `abandon`" in DOCUMENT
