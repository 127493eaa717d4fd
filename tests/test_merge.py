"""Merged calibrations, by hand: two sessions whose means, sums and intervals can be worked out on paper."""

from __future__ import annotations

from math import sqrt

import builders
import numpy as np
import pytest

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.laws import fit_line, laws_of, service_line
from b2gmodel.merge import merged
from b2gmodel.prediction import predict
from b2gmodel.records import (
    Calibration,
    CalibrationPoint,
    Clock,
    ComputeLaw,
    CountersCheck,
    Estimate,
    LegTimes,
    LoadedPoint,
    RawFile,
    ServerInfo,
    TransportLaw,
    canonical_bytes,
)

# Student's 95 % and 97.5 % points with one degree of freedom, and the normal's: from tables.
T95, T975, Z95, Z975 = 6.313752, 12.706205, 1.644854, 1.959964
EMBEDDED = ServerInfo(name="triton", version="2", address=None, embedded=True)


def session(number: int, *points: CalibrationPoint, **changes: object) -> Calibration:
    facts = {"session_ids": (f"s{number}",), "server": EMBEDDED, "raw": RawFile(file="x", sha256="0" * 64, rows=1)}
    return builders.calibration(*points).model_copy(update=facts | changes)


def whole(service_s: float, transport_s: float, **changes: object) -> CalibrationPoint:
    """A point that states all that a live calibration states."""
    plain = builders.point(service_s=service_s, transport_s=transport_s, blocks=2)
    legs: dict[str, object] = dict.fromkeys(LegTimes.model_fields)
    legs |= {"cycles": 20, "send_s": transport_s / 2, "residual_share": 0.001}
    facts: dict[str, object] = {
        "cycles": 100,
        "warmup_cycles": 10,
        "stopped_by": "precision",
        "elapsed_s": 3.0,
        "service_s": Estimate(mean=service_s, low=service_s, high=service_s, level=0.95, cv=0.1, quantiles={"p50": 1}),
        "queue_s": Estimate(mean=0.0, cv=None),
        "counters": CountersCheck(executions=100, service_s=service_s, relative_difference=0.01),
        "disturbance": Estimate(mean=0.02, low=0.0, high=0.04, level=0.95),
        "legs": LegTimes.model_validate(legs),
    }
    return plain.model_copy(update=facts | changes)


def pair(**changes: object) -> CalibrationPoint:
    """S of 10 and 12 ms, D of 14 and 16 ms; the first point of the merged calibration."""
    return merged([session(0, whole(0.010, 0.014)), session(1, whole(0.012, 0.016, **changes))]).points[0]


def known(value: Estimate | None) -> Estimate:
    assert value is not None
    return value


class TestPoint:
    def test_times_are_means_over_sessions_with_students_interval(self) -> None:
        """Two values 2 ms apart: their standard error is 1 ms."""
        point = pair()
        for estimate, mean in ((point.service_s, 0.011), (point.transport_s, 0.015), (point.cycle_s, 0.026)):
            error = 0.002 if mean == 0.026 else 0.001
            assert known(estimate).mean == pytest.approx(mean)
            assert known(estimate).low == pytest.approx(mean - T975 * error)
            assert known(estimate).high == pytest.approx(mean + T975 * error)
            assert known(estimate).level == 0.95
        assert point.throughput_per_s == pytest.approx(8 / 0.026)
        assert known(point.transport_share).mean == pytest.approx(0.015 / 0.026)
        assert known(point.transport_share).high == pytest.approx(0.015 / 0.026 + T975 * abs(14 / 24 - 16 / 28) / 2)

    def test_each_session_weighs_alike(self) -> None:
        assert known(pair(cycles=100_000).service_s).mean == pytest.approx(0.011)

    def test_the_spread_is_that_of_cycles(self) -> None:
        """10 % of 10 and of 12 ms; not the spread of the two means, nor one that grows by it."""
        point = pair()
        assert known(point.service_s).cv == pytest.approx(0.1 * sqrt((10**2 + 12**2) / 2) / 11)
        assert known(point.service_s).quantiles is None
        assert known(point.queue_s).cv is None

    def test_blocks_keep_apart_by_session(self) -> None:
        blocks = pair().blocks
        assert blocks is not None
        assert [block.session for block in blocks] == [0, 0, 1, 1]
        assert [block.service_s for block in blocks] == pytest.approx([0.0099, 0.0101, 0.01188, 0.01212])

    def test_counts_are_sums(self) -> None:
        point = pair(cycles=300, warmup_cycles=5, elapsed_s=4.0)
        assert (point.cycles, point.warmup_cycles, point.elapsed_s) == (400, 15, 7.0)

    def test_one_budget_that_ended_is_enough_to_say_so(self) -> None:
        assert (pair().stopped_by, pair(stopped_by="budget").stopped_by) == ("precision", "budget")

    def test_counters_are_of_all_that_was_booked(self) -> None:
        """100 x 10 ms and 300 x 12 ms booked, against 1 % more and as much: 10 ms of 4.6 s."""
        check = pair(counters=CountersCheck(executions=300, service_s=0.012, relative_difference=0.0)).counters
        assert check is not None
        assert check.executions == 400
        assert check.service_s == pytest.approx(4.6 / 400)
        assert check.relative_difference == pytest.approx(0.01 / 4.6)

    def test_legs_are_means_of_medians(self) -> None:
        legs = pair().legs
        assert legs is not None
        assert (legs.cycles, legs.send_s, legs.pack_s) == (40, pytest.approx(0.0075), None)

    def test_disturbance_is_over_sessions(self) -> None:
        disturbance = known(pair(disturbance=Estimate(mean=0.04)).disturbance)
        assert (disturbance.mean, disturbance.high) == pytest.approx((0.03, 0.03 + T975 * 0.01))

    @pytest.mark.parametrize("name", ["queue_s", "transport_share", "counters", "disturbance", "legs", "cycles"])
    def test_what_one_session_lacks_the_whole_lacks(self, name: str) -> None:
        assert getattr(pair(), name) is not None
        assert getattr(pair(**{name: None}), name) is None


class TestLaws:
    def law(
        self, first: list[float], second: list[float], half: float | None = None, **second_too: object
    ) -> TransportLaw:
        loaded = [LoadedPoint(null_flights=0, cycles=45, service_s=each) for each in (0.010, 0.012)]
        laws = [builders.transport_law(rates, relative_half_width=half) for rates in (first, second)]
        laws = [law.model_copy(update={"loaded": (each,)}) for law, each in zip(laws, loaded, strict=True)]
        laws[1] = laws[1].model_copy(update=second_too)
        points = [builders.point().model_copy(update={"transport_law": law}) for law in laws]
        found = merged([session(number, point) for number, point in enumerate(points)]).points[0].transport_law
        assert found is not None
        return found

    def test_rates_by_the_mean_time_a_batch(self) -> None:
        """100 and 50 a second are 10 and 20 ms a batch: 15 ms, and one third of it is the standard error."""
        point = self.law([100.0], [50.0]).points[0]
        rate = point.batches_per_s
        assert rate.mean == pytest.approx(1 / 0.015)
        assert rate.high == pytest.approx((1 + Z975 / 3 * T95 / Z95) / 0.015)
        assert rate.low == pytest.approx((1 - Z975 / 3 * T95 / Z95) / 0.015)
        assert (point.cycle_s, point.service_s, point.queue_s) == pytest.approx((0.015, 0.001, 0.0))
        assert point.transport_s == pytest.approx(0.014)

    def test_ninety_per_cent_of_what_laws_draw_are_students_ninety(self) -> None:
        """Of the rate at two batches in flight, as ``laws_of`` draws it; three sessions, t = 2.919986."""
        rates = [99.0, 100.0, 101.0]
        points = [
            builders.point(blocks=20, transport_s=0.015).model_copy(
                update={"transport_law": builders.transport_law([50.0, rate], held_s=1e-9)}
            )
            for rate in rates
        ]
        one = merged([session(number, point) for number, point in enumerate(points)])
        drawn = laws_of(one, one.points[0], 40_000, np.random.default_rng(1)).transport_rates_per_s
        assert drawn is not None
        error = float(np.std([1 / rate for rate in rates], ddof=1)) / sqrt(3) * 100
        low, high = np.quantile(drawn[1:, 1], [0.05, 0.95])
        assert (high - low) / 200 == pytest.approx(2.919986 * error, rel=0.02)

    def test_sessions_that_agree_by_chance_know_no_more_than_their_runs(self) -> None:
        rate = self.law([100.0], [100.0], half=0.02).points[0].batches_per_s
        assert (rate.low, rate.high) == pytest.approx((100 * (1 - 0.02 / sqrt(2)), 100 * (1 + 0.02 / sqrt(2))))

    def test_a_difference_between_sessions_wins_over_narrow_runs(self) -> None:
        narrow, none = (self.law([100.0], [90.0], half=half).points[0].batches_per_s for half in (0.001, None))
        assert narrow == none

    def test_service_under_load(self) -> None:
        assert self.law([100.0], [100.0]).loaded == (LoadedPoint(null_flights=0, cycles=90, service_s=0.011),)

    def test_instances(self) -> None:
        laws = [builders.compute_law(0.010, 0.016), builders.compute_law(0.012, 0.018)]
        points = [builders.point().model_copy(update={"compute_law": law}) for law in laws]
        law = merged([session(number, point) for number, point in enumerate(points)]).points[0].compute_law
        assert isinstance(law, ComputeLaw)
        assert [point.service_s for point in law.points] == pytest.approx([0.011, 0.017])


class TestRecord:
    def test_one_calibration_stays_as_it_is(self) -> None:
        assert merged([session(0)]) == session(0)

    def test_what_it_names(self) -> None:
        one, two = session(0, notes=("a", "b")), session(1, notes=("b", "c"))
        whole = merged([one, two])
        assert (whole.name, whole.session_ids, whole.raw) == ("cal", ("s0", "s1"), None)
        assert whole.notes == ("a", "b", "c", "calibrated over 2 starts of the server")
        assert Calibration.model_validate_json(canonical_bytes(whole)) == whole

    def test_each_start_of_the_embedded_server_has_its_own_name(self) -> None:
        one, two = (EMBEDDED.model_copy(update={"name": name}) for name in ("b2g-1", "b2g-2"))
        assert merged([session(0, server=one), session(1, server=two)]).server == one
        own = [session(n, server=each.model_copy(update={"embedded": False})) for n, each in enumerate((one, two))]
        with pytest.raises(UsageError, match="they differ in server name: saw 'b2g-2'; allowed: b2g-1"):
            merged(own)

    def test_a_server_of_the_users_own_may_not_have_been_started_between(self) -> None:
        own = EMBEDDED.model_copy(update={"embedded": False})
        whole = merged([session(0, server=own), session(1, server=own)])
        assert whole.notes == ("calibrated over 2 sessions of a server that was not started for them",)

    def test_a_clock_of_one_boot_is_named_and_of_two_is_not(self) -> None:
        one, two = (Clock(domain="CLOCK_MONOTONIC", boot_id=boot) for boot in ("a", "b"))
        assert merged([session(0, clock=one), session(1, clock=one)]).clock == one
        assert merged([session(0, clock=one), session(1, clock=two)]).clock is None

    def test_a_prediction_says_so_of_one_start_alone(self) -> None:
        note = "the intervals are those of one start of the server: what differs between starts is not in them"
        one = session(0)
        assert note in predict(one).notes
        assert note not in predict(merged([one, session(1)])).notes
        assert note not in predict(one, draws=0).notes

    def test_a_line_is_fitted_through_sessions_not_their_blocks(self) -> None:
        points = [
            [builders.point(k, service_s=0.001 * k * factor, transport_s=0.01) for k in (1, 2, 4)]
            for factor in (0.9, 1.0, 1.1)
        ]
        of = merged([session(number, *each) for number, each in enumerate(points)])
        means = [np.array([0.0009, 0.001, 0.0011]) * k for k in (1, 2, 4)]
        assert service_line(of).covariance == pytest.approx(fit_line([1.0, 2.0, 4.0], means).covariance)


class TestRefusals:
    def test_nothing(self) -> None:
        with pytest.raises(UsageError, match="there is nothing to merge"):
            merged([])

    @pytest.mark.parametrize(
        ("changes", "name", "seen"),
        [
            ({"transport": "shm"}, "transport", "'shm'; allowed: http"),
            ({"model": builders.model_info(instances=2)}, "model instances", "'2'; allowed: 1"),
            ({"model": builders.model_info(name="n")}, "model name", "'n'; allowed: m"),
            ({"server": EMBEDDED.model_copy(update={"version": "3"})}, "server version", "'3'; allowed: 2"),
            ({"server": None}, "server", ""),
            ({"software": builders.SOFTWARE}, "software", ""),
            ({"points": (builders.point(4),)}, "batch sizes", r"'\[4\]'; allowed: \[8\]"),
        ],
    )
    def test_what_differs_is_named(self, changes: dict[str, object], name: str, seen: str) -> None:
        with pytest.raises(UsageError, match=f"cal: the calibrations are not of one thing: .* in {name}.*{seen}"):
            merged([session(0), session(1, **changes)])

    def test_bytes_that_differ(self) -> None:
        other = builders.point().model_copy(update={"payload_bytes": 1})
        with pytest.raises(UsageError, match="they differ in payload_bytes at k = 8: saw '1'; allowed: 48"):
            merged([session(0), session(1, other)])

    def test_laws_that_differ(self) -> None:
        law = builders.transport_law([50.0, 60.0])
        points = [
            builders.point().model_copy(update={"transport_law": each})
            for each in (law, None, builders.transport_law([50.0]), law.model_copy(update={"null_model": "n"}))
        ]
        for other in points[1:]:
            with pytest.raises(UsageError, match="they differ in transport law at k = 8"):
                merged([session(0, points[0]), session(1, other)])
        compute = builders.point().model_copy(update={"compute_law": builders.compute_law(0.01)})
        with pytest.raises(UsageError, match="they differ in compute law at k = 8"):
            merged([session(0), session(1, compute)])

    def test_a_session_twice(self) -> None:
        with pytest.raises(EvidenceError, match="a session would count twice: saw 's0, s0'"):
            merged([session(0), session(0)])

    @pytest.mark.parametrize("session_ids", [(), ("s1", "s2")])
    def test_calibrations_of_other_than_one_session(self, session_ids: tuple[str, ...]) -> None:
        with pytest.raises(EvidenceError, match=f"one session each .*: saw '{len(session_ids)} sessions'"):
            merged([session(0), session(1, session_ids=session_ids)])

    @pytest.mark.parametrize("name", ["cycle_s", "service_s", "transport_s", "blocks"])
    def test_a_point_without_times(self, name: str) -> None:
        bare = builders.point().model_copy(update={name: None})
        with pytest.raises(EvidenceError, match="the calibrations do not state what is merged"):
            merged([session(0), session(1, bare)])
