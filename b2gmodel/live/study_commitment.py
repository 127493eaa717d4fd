"""What a study's runs commit to: the prediction that was frozen in its folder before them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from b2gmodel.ledger import Ledger
from b2gmodel.ledger_lines import Entry

PREDICTIONS: Final = "predictions"


def ledger_of(folder: Path) -> Ledger:
    """The study's own ledger."""
    return Ledger(folder / PREDICTIONS)


def frozen_prediction(folder: Path) -> Entry | None:
    """The first that was frozen, or None. Raises ``EvidenceError`` where the ledger was changed."""
    return next((entry for entry in ledger_of(folder).entries() if entry.event == "freeze"), None)
