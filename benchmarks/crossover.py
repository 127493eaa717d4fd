"""R and the crossover payload: what was predicted from single-flight before a study's first run, against its runs.

    b2g study all crossover --out calibration/local/crossover --figure docs/crossover.svg   # the study itself
    python benchmarks/crossover.py [--study calibration/local/crossover]                    # reads its verdict

Held where the sign of X_C3 - X_C1, and of R where it is defined, was predicted right wherever the measured interval
excludes zero, and each predicted crossover lies in the measured interval or within 15 % of the measured one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from b2gmodel.placement_records import StudyVerdict
from b2gmodel.records import Estimate
from b2gmodel.store import read_record

NEAR = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("calibration/local/crossover"))
    paths = sorted(parser.parse_args().study.glob("predictions/*-verdict-*.json"))
    if not paths:
        print("no verdict: run the study first", file=sys.stderr)
        return 2
    verdict = read_record(paths[-1], StudyVerdict)
    signs = []
    for cell in sorted(verdict.cells, key=lambda cell: (cell.concurrency, cell.payload_bytes)):
        assert cell.predicted is not None
        told = [f"{cell.payload_bytes / 1024:5.0f} KiB c = {cell.concurrency}"]
        for name, seen, promised in (
            ("X_C3/X_C1 - 1", cell.gain, cell.predicted.gain.mean),
            ("R", cell.ratio, cell.predicted.proxy_gain_per_s.mean),
        ):
            right = None if seen is None or not _excludes_zero(seen) else (seen.mean > 0) == (promised > 0)
            word = {None: "cannot be told", True: "right", False: "wrong"}[right]
            told.append(f"{name} {_interval(seen)}: {word}")
            signs += [] if right is None else [right]
        print("; ".join(told))
    places = []
    for each in verdict.crossovers:
        near = each.error is not None and abs(each.error) <= NEAR
        places.append(bool(each.inside) or near)
        print(
            f"crossover c = {each.predicted.concurrency}: predicted {_kib(each.predicted.payload_bytes)}, "
            f"measured {_kib(each.measured.payload_bytes)} KiB; inside {each.inside}, error {each.error}"
        )
    held = all(signs) and bool(signs) and all(places) and bool(places)
    print(
        json.dumps(
            {
                "name": "crossover",
                "value": {"signs_right": sum(signs), "signs_told": len(signs), "crossovers_right": sum(places)},
                "bar": {"signs": "all that can be told", "crossovers": "inside, or within 15 %"},
                "held": held,
                "spread": [each.error for each in verdict.crossovers],
            }
        )
    )
    return 0 if held else 1


def _excludes_zero(found: Estimate) -> bool:
    return found.low is not None and found.high is not None and not found.low <= 0 <= found.high


def _interval(found: Estimate | None) -> str:
    return "undefined" if found is None else f"{found.mean:+.2f} [{found.low or 0:+.2f}, {found.high or 0:+.2f}]"


def _kib(found: Estimate | None) -> str:
    if found is None:
        return "none"
    low, high = ("outside" if limit is None else f"{limit / 1024:.0f}" for limit in (found.low, found.high))
    return f"{found.mean / 1024:.0f} [{low}, {high}]"


if __name__ == "__main__":
    sys.exit(main())
