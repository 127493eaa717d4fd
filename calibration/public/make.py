"""Predict the published sweeps (public_sweeps.json) from their rows at concurrency 1: docs/public-sweeps.md and .svg.

python calibration/public/make.py [--check]

``--check`` writes nothing, and exits 1 where the page is not what this command makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from b2gmodel.report.sweeps import read_sweeps
from b2gmodel.report.sweeps_page import COMMAND, draw_peaks, page, score_all

SWEEPS = Path(__file__).parent / "public_sweeps.json"
PAGE = Path(__file__).parents[2] / "docs" / "public-sweeps.md"


def main(arguments: list[str], sweeps_file: Path = SWEEPS, page_file: Path = PAGE) -> int:
    """Write the page and its figure, or check the page; the exit code."""
    sweeps = read_sweeps(sweeps_file)
    made = page(sweeps)
    if arguments == ["--check"]:
        is_same = page_file.is_file() and page_file.read_text(encoding="utf-8") == made
        print(f"{page_file.name}: {'as made' if is_same else f'not what the command makes: {COMMAND}'}")
        return 0 if is_same else 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    page_file.write_text(made, encoding="utf-8")
    draw_peaks(score_all(sweeps), page_file.with_suffix(".svg"))
    print(page_file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
