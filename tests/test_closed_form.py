"""The closed form against hand-worked cases, published figures, and the oracles' printed digits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2gmodel.closed_form import (
    Bounds,
    Station,
    asymptotic_bounds,
    balanced_job_bounds,
    cycle_to_service_from_share,
    flights_distribution,
    knee,
    mstar,
    optimal_flights,
    response_time,
    throughput,
    utilisation,
)
from b2gmodel.errors import UsageError

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "oracles.json").read_text(encoding="utf-8"), parse_float=Decimal
)
INF = math.inf
CYCLE = [Station(0.3), Station(0.8), Station(1.2, 2), Station(1.0), Station(1.5, INF)]


@pytest.mark.parametrize(
    ("cycle_to_service", "instances", "flights"),
    [
        (61.3 / 27.6, 1, 3),
        (61.3 / 27.6, 2, 5),
        (1.0, 1, 1),
        (1.0, 4, 4),
        (3.0, 1, 3),
        (3.0000000000000004, 1, 3),
        (2.9999999999999996, 1, 3),
        (3.0 * (1 + 0.9e-9), 1, 3),
        (3.0 * (1 + 1.1e-9), 1, 4),
        (3.0000001, 1, 4),
        (1.5, 2, 3),
        (1.1, 3, 4),
        (0.3, 1, 1),
        (0.3, 4, 4),
        (1e15, 1, 10**15),
    ],
)
def test_optimal_flights_is_the_ceiling(cycle_to_service: float, instances: int, flights: int) -> None:
    assert optimal_flights(cycle_to_service, instances) == flights


@given(st.integers(1, 64), st.integers(1, 16), st.floats(1e-6, 1e3))
def test_a_whole_ratio_never_rounds_up(ratio: int, instances: int, service_s: float) -> None:
    assert optimal_flights((ratio * service_s) / service_s, instances) == ratio * instances
    assert mstar(service_s, ratio * service_s, instances).m_star == (ratio + 1) * instances


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 16))
def test_mstar_is_the_first_to_reach_saturation(service_s: float, transport_s: float, instances: int) -> None:
    form = mstar(service_s, transport_s, instances)
    reached = form.m_star * form.single_flight_rate_per_s
    before = (form.m_star - 1) * form.single_flight_rate_per_s
    assert reached >= form.saturation_rate_per_s * (1 - 2e-9)
    assert before < form.saturation_rate_per_s
    assert form.m_star >= instances
    assert form.gain == pytest.approx(form.saturation_rate_per_s / form.single_flight_rate_per_s, rel=1e-8)


def test_mstar_worked_by_hand() -> None:
    form = mstar(0.0276, 0.0337)
    assert form.m_star == 3
    assert form.cycle_s == pytest.approx(0.0613)
    assert form.transport_share == pytest.approx(337 / 613)
    assert form.single_flight_rate_per_s == pytest.approx(1 / 0.0613)
    assert form.saturation_rate_per_s == pytest.approx(1 / 0.0276)
    assert form.gain == pytest.approx(613 / 276)
    assert form.why == (
        "a batch holds its instance for 27.6 ms of a 61.3 ms cycle, so it takes 2.221 batches in flight, "
        "in whole batches 3, to keep 1 instance busy."
    )


def test_one_instance_is_ceil_of_transport_over_service_plus_one() -> None:
    for transport_ms in range(1, 200):
        assert mstar(0.007, transport_ms / 1000).m_star == -(-transport_ms // 7) + 1


@pytest.mark.parametrize(("transport_s", "gain"), [(0.0, 1.0), (-0.01, 0.9)])
def test_transport_of_nothing_or_less_gives_one_batch_an_instance(transport_s: float, gain: float) -> None:
    assert mstar(0.1, transport_s).m_star == 1
    assert mstar(0.1, transport_s).gain == pytest.approx(gain)
    assert mstar(0.1, transport_s, instances=3).m_star == 3
    assert "one batch for each of 3 instances" in mstar(0.1, transport_s, instances=3).why


def test_the_published_study() -> None:
    large, small = cycle_to_service_from_share(0.69), cycle_to_service_from_share(0.32)
    assert optimal_flights(large) == 4
    assert optimal_flights(small) == 2
    promised = [
        throughput(m, single_flight_rate_per_s=90, cycle_to_service=large, instances=1) for m in (1, 2, 3, 4, 8)
    ]
    assert promised == pytest.approx([90, 180, 270, 90 / 0.31, 90 / 0.31])
    assert round(promised[3]) == 290
    assert throughput(2, single_flight_rate_per_s=448, cycle_to_service=small) == pytest.approx(448 / 0.68)


def test_throughput_of_several_instances() -> None:
    curve = [throughput(m, single_flight_rate_per_s=10, cycle_to_service=1.5, instances=2) for m in range(1, 6)]
    assert curve == pytest.approx([10, 20, 30, 30, 30])


def test_distribution_of_flights() -> None:
    assert flights_distribution([2.9, 3.0, 3.1, 3.2, 4.5]) == {3: 0.4, 4: 0.4, 5: 0.2}
    assert flights_distribution([1.5], instances=4) == {6: 1.0}
    with pytest.raises(UsageError, match="no draws"):
        flights_distribution([])


BAD = [0.0, -1.0, math.nan, INF, -INF]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_positive_and_finite_raises(bad: float) -> None:
    refused: list[Callable[[], object]] = [
        lambda: mstar(bad, 0.1),
        lambda: optimal_flights(bad),
        lambda: flights_distribution([2.0, bad]),
        lambda: throughput(1, single_flight_rate_per_s=bad, cycle_to_service=2.0),
        lambda: throughput(1, single_flight_rate_per_s=2.0, cycle_to_service=bad),
        lambda: Station(bad),
        lambda: utilisation(bad, Station(1.0)),
        lambda: response_time(3, bad),
    ]
    for call in refused:
        with pytest.raises(UsageError, match="must be positive"):
            call()


@pytest.mark.parametrize("bad", [0, -1, 1.5, math.nan, True, None, "2"])
def test_counts_are_whole_and_at_least_one(bad: Any) -> None:
    refused: list[Callable[[], object]] = [
        lambda: mstar(0.1, 0.1, bad),
        lambda: optimal_flights(2.0, bad),
        lambda: throughput(bad, single_flight_rate_per_s=1.0, cycle_to_service=2.0),
        lambda: throughput(1, single_flight_rate_per_s=1.0, cycle_to_service=2.0, instances=bad),
        lambda: asymptotic_bounds(CYCLE, bad),
        lambda: balanced_job_bounds(CYCLE, bad),
        lambda: response_time(bad, 1.0),
    ]
    for call in refused:
        with pytest.raises(UsageError, match="not a count"):
            call()


@pytest.mark.parametrize("transport_s", [math.nan, INF, -INF, -0.1, -0.2])
def test_a_cycle_must_be_finite_and_positive(transport_s: float) -> None:
    with pytest.raises(UsageError):
        mstar(0.1, transport_s)


def test_ratios_beyond_a_float_raise() -> None:
    with pytest.raises(UsageError, match="saw inf"):
        mstar(1e-300, 1e300)
    with pytest.raises(UsageError, match="saw inf"):
        optimal_flights(1e308, 100)


@pytest.mark.parametrize("share", [1.0, 1.5, math.nan, INF])
def test_a_share_leaves_time_for_service(share: float) -> None:
    with pytest.raises(UsageError, match="transport share"):
        cycle_to_service_from_share(share)


@pytest.mark.parametrize("servers", [0, -1, 1.5, math.nan, -INF])
def test_servers_are_whole_or_infinite(servers: float) -> None:
    with pytest.raises(UsageError, match="number of servers"):
        Station(1.0, servers)


def test_a_network_needs_a_station() -> None:
    for refused in (knee, lambda s: asymptotic_bounds(s, 1), lambda s: balanced_job_bounds(s, 1)):
        with pytest.raises(UsageError, match="without stations"):
            refused([])


def test_the_knee_of_the_deterministic_cycle() -> None:
    oracle = ORACLES["deterministic_cycle"]
    assert knee(CYCLE) == pytest.approx(4.8)
    assert optimal_flights(knee(CYCLE)) == oracle["M_star"]
    for flights in range(1, 12):
        high = asymptotic_bounds(CYCLE, flights).throughput_high_per_s
        assert high == pytest.approx(min(flights / 4.8, 1.0), rel=1e-14)


def test_the_asymptotic_row_of_the_variability_bracket() -> None:
    oracle = ORACLES["variability_bracket"]
    for flights, printed in zip(oracle["M"], oracle["asymptotic"], strict=True):
        high = asymptotic_bounds(CYCLE, flights).throughput_high_per_s
        assert abs(Decimal(high) - printed) <= Decimal("0.5").scaleb(printed.as_tuple().exponent)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 16))
def test_the_knee_generalises_mstar(service_s: float, transport_s: float, instances: int) -> None:
    stations = [Station(service_s, instances), Station(transport_s, INF)]
    assert knee(stations) == pytest.approx(instances * (service_s + transport_s) / service_s)
    assert max(instances, optimal_flights(knee(stations))) == mstar(service_s, transport_s, instances).m_star


def test_delays_alone_have_no_knee() -> None:
    assert knee([Station(2.0, INF)]) == INF
    assert asymptotic_bounds([Station(2.0, INF)], 6) == Bounds(3.0, 3.0, 0.0, 0.0)
    assert balanced_job_bounds([Station(2.0, INF)], 6) == Bounds(3.0, 3.0, 0.0, 0.0)


def test_asymptotic_bounds_by_hand() -> None:
    # D = 5 + 4 + 3 = 12 s, slowest 5 s, Z = 15 s; heavy load at N = 20, light at N = 2.
    stations = [Station(5.0), Station(4.0), Station(3.0), Station(15.0, INF)]
    light, heavy = asymptotic_bounds(stations, 2), asymptotic_bounds(stations, 20)
    assert light == Bounds(2 / 39, 2 / 27, 12.0, 24.0)
    assert heavy == Bounds(20 / 255, 20 / 100, 85.0, 240.0)


def test_balanced_job_bounds_by_hand() -> None:
    # N = 2: R >= 12 + 4 * 12 / 27 and R <= 12 + 5 * 24 / 39, from Lazowska et al., table 5.3.
    bounds = balanced_job_bounds([Station(5.0), Station(4.0), Station(3.0), Station(15.0, INF)], 2)
    assert bounds.response_low_s == pytest.approx(12 + 48 / 27)
    assert bounds.response_high_s == pytest.approx(12 + 120 / 39)
    assert bounds.throughput_high_per_s == pytest.approx(2 / (27 + 48 / 27))
    assert bounds.throughput_low_per_s == pytest.approx(2 / (27 + 120 / 39))


def test_balanced_job_bounds_of_a_balanced_network_meet() -> None:
    for jobs in (1, 4, 100):
        bounds = balanced_job_bounds([Station(1.0)] * 3, jobs)
        assert bounds.throughput_low_per_s == pytest.approx(jobs / (jobs + 2))
        assert bounds.throughput_high_per_s == pytest.approx(jobs / (jobs + 2))


def test_one_job_meets_no_queue_whatever_the_servers() -> None:
    bounds = balanced_job_bounds(CYCLE, 1)
    assert bounds.throughput_low_per_s == pytest.approx(1 / 4.8)
    assert bounds.throughput_high_per_s == pytest.approx(1 / 4.8)


def test_the_laws() -> None:
    assert utilisation(2.0, Station(0.8, 2)) == pytest.approx(0.8)
    assert utilisation(5.0, Station(0.3)) == pytest.approx(1.5)  # the caller's to report, not to hide
    assert response_time(80, 2.0, think_s=10.0) == pytest.approx(30.0)
    with pytest.raises(UsageError, match="a delay has no utilisation"):
        utilisation(2.0, Station(0.8, INF))
    for think_s in (-1.0, 41.0, math.nan):
        with pytest.raises(UsageError, match="think time"):
            response_time(80, 2.0, think_s)


def test_it_imports_nothing_heavy() -> None:
    script = (
        "import sys, b2gmodel.closed_form; "
        "print(*sorted({'numpy', 'scipy', 'pandas', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
