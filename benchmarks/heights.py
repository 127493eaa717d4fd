"""Place and height over the cells of calibration/local/: what each prediction promised against what was measured.

    python benchmarks/heights.py [--predictions predictions]

Reads verdicts; calibration/local/make.py makes them (a calibration, a frozen prediction and a measurement for each of
four workloads over three transports, emulated compute). Held where the errors of the best predictor (the one whose
height is claimed) beyond M = 1 are at most 5 % at the median and 15 % at the 90th percentile, and X at its M* is
within 3 % of the measured peak in 90 % of the cells.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from b2gmodel.records import Verdict
from b2gmodel.store import read_record

MEDIAN, HIGH, REGRET, SHARE = 0.05, 0.15, 0.03, 0.9
BEST = "simulation"
SHOWN = (BEST, "mva", "closed-form", "twice-instances")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=Path, default=Path("predictions"))
    paths = sorted(parser.parse_args().predictions.glob("local-*-measured-verdict-*.json"))
    verdicts = {path.name.removeprefix("local-").split("-measured")[0]: read_record(path, Verdict) for path in paths}
    if not verdicts:
        print("no verdicts: run calibration/local/make.py first", file=sys.stderr)
        return 2
    errors: dict[str, list[float]] = {name: [] for name in SHOWN}
    regrets = []
    for cell, verdict in verdicts.items():
        regrets.append(verdict.regret.mean)
        own = {(score.predictor, score.flights): score.error for score in verdict.heights}
        flights = sorted({m for _, m in own if m > 1})
        for name in SHOWN:
            errors[name] += [own[name, m] for m in flights]
        told = " ".join(f"{m}:{own[BEST, m]:+.1%}" for m in flights)
        print(f"{cell:<26} {verdict.outcome:<13} M* {verdict.m_star} regret {regrets[-1]:5.1%}  {BEST} {told}")
    for name, values in errors.items():
        median, high, most = np.quantile(np.abs(values), [0.5, 0.9, 1.0])
        print(f"{name:<16} errors beyond M = 1: median {median:.1%}, 90 % {high:.1%}, most {most:.1%}")
    median, high = np.quantile(np.abs(errors[BEST]), [0.5, 0.9])
    near = float(np.mean(np.array(regrets) <= REGRET))
    held = bool(median <= MEDIAN and high <= HIGH and near >= SHARE)
    print(
        json.dumps(
            {
                "name": "heights",
                "value": {"median": round(median, 4), "p90": round(high, 4), "cells_within_regret": round(near, 3)},
                "bar": {"median": MEDIAN, "p90": HIGH, "regret": REGRET, "cells_within_regret": SHARE},
                "held": held,
                "spread": [round(min(errors[BEST]), 3), round(max(errors[BEST]), 3)],
                "cells": len(verdicts),
            }
        )
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
