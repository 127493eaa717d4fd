"""S after a pause, back to back and under load, with the GPU's clocks: ``python idle.py OUT.json --model M -k K``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from b2gmodel.errors import B2GError
from b2gmodel.live.engines import parse_compute
from b2gmodel.live.gpu import Gpu
from b2gmodel.live.idle import service_regimes
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.target import EmbeddedTarget
from b2gmodel.units import format_duration


def main() -> int:
    options = _options()
    target = EmbeddedTarget.of(parse_compute(options.compute))
    with target.session((options.model,)) as endpoint:
        found = run_loop(service_regimes(endpoint, options.model, options.k, gpu=Gpu.find()))
    options.out.write_text(json.dumps([asdict(regime) for regime in found], indent=1) + "\n")
    slowest, busy = found[0], found[-1]
    print(f"S at idle is {slowest.service_s / busy.service_s:.2f} times that under load")
    for regime in found:
        when = "under load" if regime.pause_s is None else f"{regime.pause_s:g} s of pause"
        clock = regime.gpu["sm_clock_mhz"]
        at = "" if clock is None else f", {clock:.0f} MHz"
        print(f"  {when:<15} S = {format_duration(regime.service_s)} over {regime.executions} batches{at}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("-k", type=int, required=True)
    parser.add_argument("--compute", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except B2GError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
