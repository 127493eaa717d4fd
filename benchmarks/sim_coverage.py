"""Coverage of the simulation's 95 % intervals for mean and P99 on M/M/1, where the truth is known.

    python benchmarks/sim_coverage.py [--repetitions 1000] [--cycles 500000] [--seed 1]

Held where each of the four shares (mean and P99 at loads 0.5 and 0.8) lies between 93 and 97 %. A run that refuses
to give an interval is run on, twice as long, as a user would.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import numpy as np

from b2gmodel.errors import EvidenceError
from b2gmodel.sim.distributions import Exponential, Independent
from b2gmodel.sim.experiments import Precision, RunResult, run_open, seeds
from b2gmodel.sim.stations import Line, Station

BAR = (0.93, 0.97)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--cycles", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(1.0)]))
    coverage: dict[str, float] = {}
    for load in (0.5, 0.8):
        mean_s = 1.0 / (1.0 - load)
        truth = {"mean": mean_s, "P99": mean_s * math.log(100)}
        hits = dict.fromkeys(truth, 0)
        for seed in seeds(options.seed, options.repetitions):
            result = run(line, load, seed, options.cycles)
            intervals = {"mean": result.response_s, "P99": result.quantiles_s[0.99]}
            for name, interval in intervals.items():
                hits[name] += interval.low <= truth[name] <= interval.high
        for name, count in hits.items():
            share = count / options.repetitions
            coverage[f"{name} at {load:g}"] = share
            print(f"M/M/1 at load {load:g}: the 95 % interval of {name} covers in {share:.1%}", flush=True)
    held = all(BAR[0] <= share <= BAR[1] for share in coverage.values())
    print(json.dumps({"name": "sim_coverage", "value": coverage, "bar": list(BAR), "held": held}))
    return 0 if held else 1


def run(line: Line, load: float, seed: np.random.SeedSequence, cycles: int) -> RunResult:
    while True:
        # A half-width that any run reaches: the length is what is fixed here.
        precision = Precision(half_width=0.9, level=0.95, first_cycles=cycles, most_cycles=cycles)
        try:
            return run_open(line, 1, load, seed, precision=precision, quantiles=(0.99,))
        except EvidenceError:
            cycles *= 2


if __name__ == "__main__":
    sys.exit(main())
