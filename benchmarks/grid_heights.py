"""Heights on a kept grid of a real Triton: 2 models x 3 payloads x M = 2..8, predicted from single-flight and a null.

    python benchmarks/grid_heights.py

The grid (``calibration/prototype/grid.json``) was measured on two shared cores with emulated compute before this
project's own live part existed; a row is noisy by 3 to 10 %. For each model and payload the row M = 1 is the
calibration, the null model's rows are the transport law, and nothing else reaches the predictors. Errors are of X(M)
beyond M = 1, predicted over measured - 1.

Held where the best predictor's median error is at most 5 % and its 90th percentile at most 15 %.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from calibrations import bare_calibration, transport_point

from b2gmodel.prediction import predict
from b2gmodel.records import Calibration, CalibrationPoint, Estimate, Prediction, TransportLaw
from b2gmodel.sim.simulation import Simulation

GRID = Path(__file__).parents[1] / "calibration" / "prototype" / "grid.json"
BARS = {"median": 0.05, "p90": 0.15}
Key = tuple[str, int, int]


def means(rows: list[dict[str, Any]]) -> dict[Key, dict[str, float]]:
    """Over the rounds, seconds and batches a second: X, C = M / X, S and queue of (model, payload, M)."""
    groups: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["payload_kib"], row["flights"]].append(row)
    found = {}
    for key, group in groups.items():
        mean = {name: float(np.mean([row[name] for row in group])) for name in group[0] if name != "model"}
        parts_ms = mean["compute_input_ms"] + mean["compute_infer_ms"] + mean["compute_output_ms"]
        rate = mean["batches_per_s"]
        found[key] = {
            "x": rate,
            "cycle_s": key[2] / rate,
            "service_s": parts_ms / 1e3,
            "queue_s": mean["queue_ms"] / 1e3,
        }
    return found


def calibration(cells: dict[Key, dict[str, float]], model: str, payload_kib: int, k: int) -> Calibration:
    """The row M = 1 of the model, and the rows of the null."""
    alone = cells[model, payload_kib, 1]
    points = tuple(
        transport_point(flights, cell["x"], cell["service_s"], cell["queue_s"])
        for (name, payload, flights), cell in sorted(cells.items())
        if (name, payload) == ("null", payload_kib)
    )
    payload_bytes = payload_kib * 1024
    law = TransportLaw(null_model="null", k=k, batch_bytes=k * payload_bytes, points=points)
    times = {"cycle_s": alone["cycle_s"], "service_s": alone["service_s"]}
    # The grid keeps means alone: these spreads are taken. With a cv of 0.02 the simulation's are 4.0, 8.8, 16.4 %.
    point = CalibrationPoint(
        k=k,
        payload_bytes=payload_bytes,
        transport_law=law,
        transport_s=Estimate(mean=times["cycle_s"] - times["service_s"], cv=0.2),
        **{name: Estimate(mean=value, cv=0.05) for name, value in times.items()},
    )
    return bare_calibration(f"{model}-{payload_kib}", GRID.name, point)


def main() -> int:
    rows = json.loads(GRID.read_text(encoding="utf-8"))["rows"]
    cells = means(rows)
    k = int(rows[0]["k"])
    errors: dict[str, list[float]] = defaultdict(list)
    for model, payload_kib in sorted({key[:2] for key in cells if key[0] != "null"}):
        made: Prediction = predict(calibration(cells, model, payload_kib, k), simulator=Simulation())
        for (name, payload, flights), cell in cells.items():
            if (name, payload) != (model, payload_kib) or flights == 1:
                continue
            for result in made.predictors:
                promised = result.at(flights)
                if promised is not None and result.kind != "bounds":
                    errors[result.name].append(promised.throughput_per_s / k / cell["x"] - 1)
    print(f"{'predictor':<16}{'median':>9}{'90 %':>9}{'max':>9}{'signed':>9}")
    best = None
    for name, values in errors.items():
        sizes = np.abs(values)
        row = {"median": float(np.median(sizes)), "p90": float(np.quantile(sizes, 0.9)), "max": float(sizes.max())}
        print(f"{name:<16}" + "".join(f"{value:>9.1%}" for value in (*row.values(), float(np.mean(values)))))
        if best is None or row["median"] < best[1]["median"]:
            best = (name, row)
    assert best is not None
    held = all(best[1][name] <= bar for name, bar in BARS.items())
    print(json.dumps({"name": "grid_heights", "value": best[1] | {"predictor": best[0]}, "bar": BARS, "held": held}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
