"""Can the instrument be trusted? Injected delays recovered, legs that add up, and what reading the counters disturbs.

    python benchmarks/instrument.py [--cycles 6]

Self-test: the fake server injects 2, 10 and 50 ms into each leg; held where each comes back in its leg within the
larger of 2 % and 0.3 ms. Legs: on the real embedded server, resnet50 at k = 8; held where the legs' sum is within
0.5 % of the cycle at the median. Disturbance: cycles with the server's counters read before them against cycles
without, in alternating blocks; held where the mean is within 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from b2gmodel.errors import EvidenceError
from b2gmodel.live.cycles import SingleFlight
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.point import measure_disturbance, measure_legs
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.self_test import self_test, within_bound
from b2gmodel.live.target import EmbeddedTarget
from b2gmodel.live.transport import HttpTransport
from b2gmodel.live.workloads import load_workloads
from b2gmodel.records import Estimate, LegTimes

DELAYS_S = (0.002, 0.01, 0.05)
LEGS_BAR = 0.005
DISTURBANCE_BAR = 0.02


async def on_the_real_server() -> tuple[LegTimes, Estimate]:
    """Legs with the server's trace, and the disturbance."""
    with EmbeddedTarget(load_workloads()).session(("resnet50",)) as endpoint:
        control = ControlPlane(endpoint.host, endpoint.port, awake=True)
        model = await control.model("resnet50", {})
        transport = HttpTransport(endpoint.host, endpoint.port, model)
        try:
            flight = SingleFlight(transport, control, model, 8, run_id="instrument")
            warm = await flight.run(30)
            disturbance = await measure_disturbance(flight, pairs=40, cycles=10)
            legs = await measure_legs(flight, control, model, "instrument", warm, endpoint.trace_file)
            return legs, disturbance
        finally:
            await transport.aclose()
            control.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=6, help="cycles of each block of the self-test")
    options = parser.parse_args()
    try:
        found = run_loop(self_test(DELAYS_S, options.cycles))
    except EvidenceError as error:
        print(error.line())
        found = ()
    for leg in found:
        error_s = leg.recovered_s - leg.injected_s
        print(f"{leg.leg:<40} injected {leg.injected_s * 1e3:5.1f} ms, off by {error_s * 1e3:+.3f} ms")
    recovered = bool(found) and all(within_bound(leg) for leg in found)
    worst_s = max((abs(leg.recovered_s - leg.injected_s) for leg in found), default=None)
    legs, disturbance = asyncio.run(on_the_real_server())
    for name, value in legs.model_dump().items():
        print(f"{name:<20} {value if value is None or not name.endswith('_s') else f'{value * 1e3:.3f} ms'}")
    print(f"disturbance {disturbance.mean:+.2%} [{disturbance.low:+.2%}, {disturbance.high:+.2%}]")
    adds_up = legs.residual_share <= LEGS_BAR
    assert disturbance.low is not None
    undisturbed = disturbance.low <= DISTURBANCE_BAR and abs(disturbance.mean) <= DISTURBANCE_BAR
    held = recovered and adds_up and undisturbed
    print(
        json.dumps(
            {
                "name": "instrument",
                "value": {
                    "worst_self_test_error_ms": None if worst_s is None else worst_s * 1e3,
                    "legs_residual_share": legs.residual_share,
                    "trace_against_counters": legs.trace_difference,
                    "disturbance": disturbance.mean,
                },
                "bar": {"self_test": "max(2 %, 0.3 ms)", "legs": LEGS_BAR, "disturbance": DISTURBANCE_BAR},
                "held": held,
                "spread": [disturbance.low, disturbance.high],
            }
        )
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
