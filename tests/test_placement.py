"""Placements, R and the crossover as predicted: by hand, by their limits, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import builders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2gmodel.crossover import crossover, not_rising, roots
from b2gmodel.errors import UsageError
from b2gmodel.placement import Placements, placement_laws, placements, predicted_cell
from b2gmodel.records import Calibration
from b2gmodel.study_prediction import Asked, predict_study


def ladder(*, transport_s: float = 0.001, rates_per_s: Sequence[float] = (800.0, 1500.0)) -> Calibration:
    """S(k) = 4 + k ms; D(k) = ``transport_s`` k; the null's rates at k = 1."""
    points = []
    for k in (1, 4, 8):
        law = builders.transport_law([rate / k for rate in rates_per_s], held_s=1e-6)
        point = builders.point(k, service_s=0.004 + 0.001 * k, transport_s=transport_s * k)
        points.append(point.model_copy(update={"transport_law": law}))
    return builders.calibration(*points)


class TestCrossover:
    @given(st.lists(st.floats(-5, 5), min_size=1, max_size=7))
    def test_fit_never_rises_and_keeps_the_mean(self, values: list[float]) -> None:
        fit = not_rising(np.array([values]))[0]
        assert np.all(np.diff(fit) <= 1e-9)
        assert fit.mean() == pytest.approx(np.mean(values), abs=1e-9)

    def test_fit_by_hand(self) -> None:
        rows = np.array([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [3.0, 0.0, 2.0]])
        assert not_rising(rows).tolist() == [[3.0, 2.0, 1.0], [2.0, 2.0, 2.0], [3.0, 1.0, 1.0]]

    def test_root_lies_on_the_line_over_the_logarithm(self) -> None:
        assert roots([1000, 4000], np.array([[0.5, -0.5]]))[0] == pytest.approx(2000)
        assert roots([1000, 4000], np.array([[0.3, -0.1]]))[0] == pytest.approx(1000 * 4**0.75)

    def test_no_root_within_the_ladder(self) -> None:
        assert roots([1, 2], np.array([[0.5, 0.1], [-0.1, -0.5]])).tolist() == [math.inf, 0.0]
        found = crossover([1, 2], np.array([[0.5, 0.1]] * 3), transport="http", k=8, concurrency=16)
        assert (found.payload_bytes, found.beyond, found.rootless_share) == (None, "above", 1.0)

    def test_a_limit_outside_the_ladder_is_not_known(self) -> None:
        gains = np.array([[0.5, -0.01]] + [[0.5, -0.01]] * 50 + [[0.5, 0.2]] * 50)
        found = crossover([1000, 4000], gains, transport="http", k=8, concurrency=16)
        assert found.payload_bytes is not None
        assert found.payload_bytes.low is not None
        assert found.payload_bytes.high is None
        assert found.rootless_share == 0.5

    def test_a_share_of_the_draws_covers_the_truth(self) -> None:
        """A crossover known within its noise: 90 % of the intervals hold it, give or take what 200 tries tell."""
        rng, payload_bytes = np.random.default_rng(1), [588, 1200, 2028, 3200, 4800]
        truth = np.log(2000 / np.array(payload_bytes))
        held = 0
        for _ in range(200):
            seen = truth + rng.normal(0, 0.1, 5)
            gains = np.vstack([seen, seen + rng.normal(0, 0.1, (200, 5))])
            where = crossover(payload_bytes, gains, transport="http", k=8, concurrency=16).payload_bytes
            assert where is not None
            held += (where.low or 0) <= 2000 <= (where.high or math.inf)
        assert 0.82 <= held / 200 <= 0.98

    @pytest.mark.parametrize("payloads", [[1], [2, 1], [1, 1]])
    def test_refuses_what_is_no_ladder(self, payloads: list[int]) -> None:
        with pytest.raises(UsageError, match="a ladder of payloads"):
            crossover(payloads, np.zeros((1, len(payloads))), transport="http", k=8, concurrency=16)


class TestPlacements:
    def test_single_flight_in_the_proxy_is_what_was_measured(self) -> None:
        found = placements(placement_laws(ladder(), 8, draws=20), 16)
        assert found.c3[0] == pytest.approx(8 / 0.020)

    def test_compute_binds_what_is_not_batched(self) -> None:
        """1 / S(1) = 200/s is far below what the transport carries; the server's own batching goes beyond it."""
        found = placements(placement_laws(ladder(), 8, draws=20), 16)
        assert 0.97 * 200 < found.c1[0] <= 200 * 1.001
        # An execution of 8 takes 12 ms: 667/s at the most.
        assert 1.5 * 200 < found.c2[0] < 667
        assert 0 < found.ratios[0] < 1

    def test_a_large_payload_turns_the_sign(self) -> None:
        slow = placements(placement_laws(ladder(transport_s=0.010, rates_per_s=(100.0, 190.0)), 8, draws=20), 16)
        assert slow.c3[0] == pytest.approx(8 / 0.092)
        assert slow.log_gains[0] < 0

    def test_compute_and_link_scale_apart(self) -> None:
        laws = placement_laws(ladder(), 8, draws=20)
        assert placements(laws.faster_compute(2.0), 16).c3[0] == pytest.approx(8 / 0.014)
        assert placements(laws.faster_link(4.0), 16).c3[0] == pytest.approx(8 / 0.014)
        same = placements(laws.faster_compute(1.0).faster_link(1.0), 16)
        assert same.c1[0] == pytest.approx(placements(laws, 16).c1[0])
        assert same.c2[0] == pytest.approx(placements(laws, 16).c2[0])

    def test_ratio_is_undefined_where_the_server_gains_nothing(self) -> None:
        ones = np.full(50, 100.0) + np.linspace(-1, 1, 50)
        found = Placements(16, c1=ones, c2=ones[::-1].copy(), c3=ones * 1.5)
        cell = predicted_cell(ladder(), found, workload="w", k=8, payload_bytes=1)
        assert cell.ratio is None
        assert cell.undefined is not None
        assert cell.gain.mean == pytest.approx(0.5)

    def test_refuses(self) -> None:
        with pytest.raises(UsageError, match="never fill a batch"):
            placements(placement_laws(ladder(), 8, draws=2), 7)
        with pytest.raises(UsageError, match="holds 1 and k"):
            placement_laws(builders.calibration(builders.point(8)), 8)


class TestStudyPrediction:
    def calibrations(self) -> dict[tuple[str, str], Calibration]:
        found = {}
        for number, transport_s in enumerate((0.0005, 0.004, 0.020), start=1):
            one = ladder(transport_s=transport_s, rates_per_s=(1 / transport_s, 1.9 / transport_s))
            points = tuple(p.model_copy(update={"payload_bytes": 1000 * 10**number}) for p in one.points)
            found[f"w{number}", "http"] = one.model_copy(update={"points": points, "session_ids": (f"s{number}",)})
        return found

    def test_signs_and_crossover_are_claimed(self) -> None:
        asked = [Asked(f"w{number}", "http", 8, 16) for number in (1, 2, 3)]
        made = predict_study("st", "0" * 64, asked, self.calibrations(), ladder=["w1", "w2", "w3"], draws=30)
        assert [claim.bound for claim in made.claims if claim.quantity == "sign_of_gain"] in ([1, 1, -1], [1, -1, -1])
        assert made.crossovers[0].payload_bytes is not None
        assert 10_000 < made.crossovers[0].payload_bytes.mean < 1_000_000
        assert made.claims[-1].quantity == "crossover_error"
        assert made.calibration_session_ids == ("s1", "s2", "s3")
        again = predict_study("st", "0" * 64, asked, self.calibrations(), ladder=["w1", "w2", "w3"], draws=30)
        assert again == made

    def test_refuses_a_cell_without_calibration(self) -> None:
        with pytest.raises(UsageError, match="no calibration"):
            predict_study("st", "0" * 64, [Asked("w9", "http", 8, 16)], self.calibrations())
