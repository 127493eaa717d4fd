"""Time of the simulation predictor's work: 4 workloads, M = 1..16, 200 bootstrap draws of 20,000 cycles each.

    python benchmarks/sim_predict.py [--workers 2]

The transport is a flow-equivalent station, the dearer of the two makes of a line; cycles are resampled, correlation
kept. Held where it takes at most 20 s of wall time on two cores, start of the processes included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from b2gmodel.sim.distributions import Resampled
from b2gmodel.sim.predictor import simulated_curves
from b2gmodel.sim.stations import Line, Station

BAR_S = 20.0
WORKLOADS = {"small": (0.002, 0.004), "resnet50": (0.009, 0.014), "yolov8n": (0.061, 0.027), "large": (0.160, 0.040)}
DRAWS, CYCLES = 200, 20_000


def draw_of(transport_s: float, service_s: float, rng: np.random.Generator) -> Line:
    """A workload as one bootstrap draw has it: its own cycles, and transport rates that level off."""
    shapes = rng.gamma(10.0, 0.1, (500, 2))
    rates_per_s = tuple(np.array([1.0, 1.6, 1.9, 2.0]) / transport_s * rng.normal(1.0, 0.02))
    stations = (Station.flow_equivalent("transport", rates_per_s), Station.queue("gpu"))
    rows = shapes / shapes.mean(axis=0) * [1.0, service_s * rng.normal(1.0, 0.02)]
    return Line(stations, ("transport", "gpu"), Resampled(rows), "gpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    total_s = 0.0
    for name, (transport_s, service_s) in WORKLOADS.items():
        lines = [draw_of(transport_s, service_s, rng) for _ in range(DRAWS)]
        begin_s = time.perf_counter()
        curves = simulated_curves(lines, range(1, 17), 1, cycles=CYCLES, workers=options.workers)
        took_s = time.perf_counter() - begin_s
        total_s += took_s
        low, high = np.quantile(curves.max(axis=1), [0.05, 0.95])
        print(f"{name}: {took_s:.2f} s, peak {low:.1f} to {high:.1f} batches/s (90 %)", flush=True)
    held = total_s <= BAR_S
    print(json.dumps({"name": "sim_predict", "value": total_s, "bar": BAR_S, "held": held, "workers": options.workers}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
