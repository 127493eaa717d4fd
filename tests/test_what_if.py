"""What if: each change by hand, each bad text refused in one line, and what is assumed said."""

from __future__ import annotations

import builders
import numpy as np
import pytest

from b2gmodel.errors import B2GError, EvidenceError, UsageError
from b2gmodel.laws import Laws
from b2gmodel.prediction import predict
from b2gmodel.records import Block, Calibration, CalibrationPoint, Estimate, Prediction
from b2gmodel.what_if import Change, changed, parse_changes

LAW = builders.transport_law([50, 80, 100], held_s=1e-12)
# mu of the usual point with this law: 1 / 15 ms, 80, 100.
RATES = [1 / 0.015, 80, 100]


def usual(**changes: object) -> Calibration:
    return builders.calibration(builders.point().model_copy(update={"transport_law": LAW} | changes))


def ladder(*ks: int, bend_s: float = 0.0) -> Calibration:
    """S(k) = 2 ms + 1 ms k, D = 3 ms + 10 us a byte; ``bend_s`` is added to S at the second."""
    points = []
    for number, k in enumerate(ks):
        service_s = 0.002 + 0.001 * k + (bend_s if number == 1 else 0.0)
        transport_s = 0.003 + 1e-5 * k * builders.PAYLOAD_BYTES
        blocks = tuple(
            Block(session=0, cycle_s=service_s + transport_s + 1e-6 * sign, service_s=service_s + 1e-6 * sign / 2)
            for sign in [1, -1] * 10
        )
        point = builders.point(k, service_s=service_s, transport_s=transport_s)
        points.append(point.model_copy(update={"blocks": blocks}))
    return builders.calibration(*points)


def after(of: Calibration, text: str, *others: Calibration, k: int | None = None, draws: int = 3) -> Laws:
    return whole(of, text, *others, k=k, draws=draws)[2]


def whole(
    of: Calibration, text: str, *others: Calibration, k: int | None = None, draws: int = 3
) -> tuple[Calibration, CalibrationPoint, Laws, tuple[str, ...]]:
    return changed(of, k, parse_changes(text, others), draws, np.random.default_rng(1))


def times(laws: Laws) -> tuple[float, float]:
    """S and D of the estimate, ms."""
    return float(laws.service_s[0]) * 1e3, float(laws.transport_s[0]) * 1e3


def rates(laws: Laws) -> list[float]:
    assert laws.transport_rates_per_s is not None
    assert laws.transport_rates_per_s.shape == (len(laws.cycle_s), 3)
    return list(laws.transport_rates_per_s[0])


class TestText:
    def test_all_of_it(self) -> None:
        found = parse_changes(" payload=0.5x, k = 16 ,instances=2,service=2x,link=10x,")
        assert found == (
            Change("payload", 0.5),
            Change("k", 16.0),
            Change("instances", 2.0),
            Change("service", 2.0),
            Change("link", 10.0),
        )
        assert [str(each) for each in found] == ["payload=0.5x", "k=16", "instances=2", "service=2x", "link=10x"]

    @pytest.mark.parametrize(
        "text",
        [
            "", ",", "payload", "payload=", "=2x", "payload=2", "k=2x", "instances=2x", "k=1.5", "k=0", "k=-1",
            "payload=0x", "payload=-1x", "service=nanx", "link=infx", "k=nan", "k=inf", "payload=x", "payload=xx",
            "speed=2x", "k==8", "k=8;payload=2x", "payload=2x k=8", "transport", "k=eight", "payload=1e999x",
        ],
    )  # fmt: skip
    def test_what_is_no_change_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(UsageError, match="--what-if: not a change") as seen:
            parse_changes(text)
        assert "\n" not in str(seen.value)
        assert "payload=0.5x" in str(seen.value)

    @pytest.mark.parametrize("text", ["k=8,k=16", "link=2x,payload=2x,link=3x"])
    def test_twice(self, text: str) -> None:
        with pytest.raises(UsageError, match="--what-if: changed twice"):
            parse_changes(text)

    def test_instances_without_end(self) -> None:
        with pytest.raises(UsageError, match="too many instances: saw 1000000000; allowed: 1 to 1024"):
            parse_changes("instances=1e9")

    def test_a_transport_that_was_not_calibrated(self) -> None:
        with pytest.raises(UsageError, match="no calibration over this transport is given: saw 'shm'; allowed: http"):
            parse_changes("transport=shm", [usual()])
        with pytest.raises(UsageError, match="allowed: none given"):
            parse_changes("transport=shm")


class TestByHand:
    def test_service(self) -> None:
        of = after(usual(), "service=0.5x")
        assert times(of) == pytest.approx((5, 15))
        assert of.busy_service_s[0, 0] == pytest.approx(0.005)
        assert rates(of) == pytest.approx(RATES)

    def test_link(self) -> None:
        """One batch size: all of D counts as bytes. Half of it, and twice the rates."""
        of = after(usual(), "link=2x")
        assert times(of) == pytest.approx((10, 7.5))
        assert rates(of) == pytest.approx([2 * rate for rate in RATES])
        assert of.batch == 8

    def test_half_the_payload_is_as_a_link_twice_as_fast_but_for_its_bytes(self) -> None:
        _, smaller, small, said = whole(usual(), "payload=0.5x")
        _, same, fast, _ = whole(usual(), "link=2x")
        assert small.cycle_s == pytest.approx(fast.cycle_s)
        assert rates(small) == pytest.approx(rates(fast))
        assert (smaller.payload_bytes, same.payload_bytes) == (24, 48)
        assert "all of D is taken to grow with the bytes" in said[1]

    def test_they_cancel(self) -> None:
        assert times(after(usual(), "payload=3x,link=3x")) == pytest.approx((10, 15))

    def test_on_a_ladder_the_fixed_part_of_d_stays(self) -> None:
        """At k = 8 D = 3 ms + 10 us x 384 = 6.84 ms, of which 3.84 ms are bytes: 56 %."""
        _, _, of, said = whole(ladder(2, 4, 8), "payload=2x")
        assert times(of) == pytest.approx((10, 3 + 2 * 3.84), rel=1e-6)
        assert "56% of D grows with the bytes, by the line D = a + b bytes" in said[1]

    def test_k_on_the_lines(self) -> None:
        seen, point, of, said = whole(ladder(1, 2, 4), "k=8")
        assert times(of) == pytest.approx((10, 6.84))
        assert (of.batch, point.k, point.payload_bytes) == (8, 8, 48)
        assert said[1] == "k: S and D on the lines through k = 1, 2, 4"
        assert of.draws == 3
        assert seen.model == builders.model_info()

    def test_k_keeps_growth_under_load_and_the_laws_shape(self) -> None:
        of_ladder = ladder(2, 4)
        grown = builders.transport_law([50, 80, 100], held_s=[1e-12, 0.003, 0.003])
        last = of_ladder.points[-1].model_copy(update={"transport_law": grown})
        of = after(of_ladder.model_copy(update={"points": (of_ladder.points[0], last)}), "k=8")
        # S(4) = 6 ms grows by 3 ms, half: S(8) = 10 ms by half, too.
        assert of.busy_service_s[0, 0] == pytest.approx(0.015, rel=1e-3)
        assert of.transport_rates_per_s is not None
        assert of.transport_rates_per_s[0, 0] == pytest.approx(1 / 0.00684, rel=1e-3)

    def test_a_line_that_does_not_fit_is_said(self) -> None:
        assert whole(ladder(1, 2, 4, bend_s=0.004), "k=8")[3][1].endswith("and a line does not fit S(k)")

    def test_more_instances_are_an_upper_bound(self) -> None:
        seen, _, of, said = whole(usual(), "instances=3")
        assert of.busy_service_s[0] == pytest.approx([0.010] * 3)
        assert (of.instances, of.is_compute_law_measured, seen.model.instances) == (3, False, 3)
        assert "an upper bound, until S(j) is calibrated" in said[1]

    def test_fewer_instances_are_as_measured(self) -> None:
        point = builders.point().model_copy(update={"compute_law": builders.compute_law(0.010, 0.012, 0.015)})
        of = builders.calibration(point, model=builders.model_info(instances=3))
        two = after(of, "instances=2")
        assert two.busy_service_s[0] == pytest.approx([0.010, 0.012])
        assert two.is_compute_law_measured

    def test_one_of_several_unmeasured_instances_is_measured(self) -> None:
        of = builders.calibration(model=builders.model_info(instances=2))
        assert after(of, "instances=1").is_compute_law_measured

    def test_transport_of_another_calibration(self) -> None:
        other = builders.calibration(
            builders.point(service_s=0.009, transport_s=0.005).model_copy(
                update={"transport_law": builders.transport_law([150, 300, 350], held_s=1e-12)}
            ),
            name="over-shm",
        ).model_copy(update={"transport": "shm"})
        seen, _, of, said = whole(usual(), "transport=shm", other)
        assert times(of) == pytest.approx((10, 5))
        assert rates(of) == pytest.approx([200, 300, 350])
        assert said == (
            "what if transport=shm: an extrapolation, not a measurement of this system",
            "transport: D and the transport law of over-shm (shm); S stays",
        )
        assert seen.transport == "shm"

    def test_another_calibration_without_uncertainty_or_law(self) -> None:
        point = builders.point(transport_s=0.005).model_copy(update={"blocks": None})
        other = builders.calibration(point).model_copy(update={"transport": "shm"})
        of = after(usual(), "transport=shm", other)
        assert of.transport_s == pytest.approx(np.full(4, 0.005))
        assert of.transport_rates_per_s is None

    def test_all_at_once(self) -> None:
        """k = 8 on the lines: S = 10 ms, D = 3 + 3.84 ms; then S half, and a quarter of the bytes' part of D."""
        _, point, of, said = whole(ladder(2, 4), "instances=2,k=8,service=0.5x,payload=0.5x,link=2x")
        assert times(of) == pytest.approx((5, 3 + 3.84 / 4), rel=1e-3)
        assert (of.instances, of.batch, point.payload_bytes, len(said)) == (2, 8, 24, 5)


class TestRefused:
    def refused(self, of: Calibration, text: str, *others: Calibration) -> B2GError:
        with pytest.raises(B2GError) as seen:
            whole(of, text, *others)
        assert "\n" not in str(seen.value)
        return seen.value

    def test_k_without_a_ladder(self) -> None:
        error = self.refused(usual(), "k=4")
        assert isinstance(error, EvidenceError)
        assert error.hint == "calibrate a ladder of batch sizes: -k 1,2,4,8"

    def test_k_beyond_the_model(self) -> None:
        error = self.refused(ladder(2, 4), "k=9")
        assert (type(error), error.observed, error.allowed) == (UsageError, 9, "1 to 8")

    def test_lines_that_reach_zero(self) -> None:
        steep = builders.calibration(
            builders.point(4, service_s=0.001, transport_s=0.001), builders.point(8, service_s=0.020, transport_s=0.020)
        )
        assert "the lines reach zero at this batch size" in str(self.refused(steep, "k=1"))

    def test_a_payload_of_nothing(self) -> None:
        assert isinstance(self.refused(usual(), "payload=0.001x"), UsageError)

    def test_published_shares(self) -> None:
        point = CalibrationPoint(k=None, payload_bytes=48, transport_share=Estimate(mean=0.6), throughput_per_s=80.0)
        assert "a what-if needs S and D in seconds" in str(self.refused(builders.calibration(point), "service=2x"))

    def test_another_calibration_of_other_bytes(self) -> None:
        other = builders.calibration(builders.point(4)).model_copy(update={"transport": "shm"})
        error = self.refused(usual(), "transport=shm", other)
        assert (error.observed, error.allowed) == ("192", "384")


def predicted(text: str, of: Calibration | None = None) -> Prediction:
    return predict(of or usual(), plan=builders.plan(), what_if=parse_changes(text), draws=50)


def test_a_prediction_says_what_it_assumes() -> None:
    made = predicted("service=0.5x")
    assert made.name == "cal-k8-what-if"
    assert made.notes[:2] == (
        "what if service=0.5x: an extrapolation, not a measurement of this system",
        "service: S becomes 0.5 times as long at every load; D stays",
    )
    assert made.service_s == pytest.approx(0.005)
    assert made.predictor("closed-form").m_star == 4


def test_more_instances_make_upper_bounds_of_all_heights() -> None:
    assert {each.kind for each in predicted("instances=2").predictors} == {"upper bound", "bounds", "rival"}
    assert predicted("service=1x").predictor("mva").kind == "estimate"
