"""Intervals cover as often as they say, warm-up is found, the bootstrap spreads as far as the estimator."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import binom

from b2gmodel.errors import EvidenceError
from b2gmodel.stats import (
    MIN_BATCHES,
    Floats,
    block_means,
    bootstrap_means,
    mean_interval,
    student_interval,
    warmup_length,
)

REPLICATIONS = 400


def autoregressive(rng: np.random.Generator, n: int, phi: float, mean: float = 10.0) -> Floats:
    """AR(1) in its stationary state from the first sample on, standard deviation 1."""
    noise = rng.normal(size=n) * np.sqrt(1 - phi**2)
    noise[0] = rng.normal()
    return np.asarray(mean + lfilter([1.0], [1.0, -phi], noise))


def covered(phi: float, *, naive: bool = False, n: int = 1000) -> int:
    """How many of ``REPLICATIONS`` intervals hold the true mean; ``naive`` takes samples for independent."""
    rng = np.random.default_rng(7)
    interval = student_interval if naive else mean_interval
    series = (autoregressive(rng, n, phi) for _ in range(REPLICATIONS))
    return sum(seen.low <= 10.0 <= seen.high for seen in map(interval, series))


LEAST, MOST = (int(binom.ppf(q, REPLICATIONS, 0.95)) for q in (0.001, 0.999))


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_the_interval_covers_at_its_level(phi: float) -> None:
    assert LEAST <= covered(phi) <= MOST


def test_the_coverage_check_fails_where_correlation_is_ignored() -> None:
    """The control: Student's interval over the raw series is far too narrow, and the same bounds see it."""
    assert covered(0.0, naive=True) >= LEAST
    assert covered(0.5, naive=True) < LEAST


def test_student_interval_by_hand() -> None:
    # n = 4, mean 2.5, s = 1.29099, t(3, 0.975) = 3.18245: half-width 2.05426.
    seen = student_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert (seen.mean, seen.half_width) == pytest.approx((2.5, 2.05426), rel=1e-5)


def test_the_mean_is_of_all_samples_even_where_blocks_leave_some_out() -> None:
    series = np.arange(39, dtype=float)
    assert mean_interval(series).mean == 19.0
    assert len(block_means(series, 20)) == 20


def test_blocks_leave_out_the_first_samples() -> None:
    rows = np.arange(14, dtype=float).reshape(7, 2)
    assert block_means(rows, 3).tolist() == [[3.0, 4.0], [7.0, 8.0], [11.0, 12.0]]


@pytest.mark.parametrize("n", [0, 1, MIN_BATCHES - 1])
def test_too_few_samples_make_no_interval(n: int) -> None:
    with pytest.raises(EvidenceError, match="too few samples"):
        mean_interval(np.ones(n))


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_samples_for_student(n: int) -> None:
    with pytest.raises(EvidenceError, match="too few samples"):
        student_interval(np.ones(n))


def test_too_few_samples_for_blocks() -> None:
    with pytest.raises(EvidenceError, match="too few samples to form blocks: saw 3; allowed: >= 4"):
        block_means(np.ones(3), 4)


class TestWarmup:
    def series(self, warmup: int, seed: int = 3, n: int = 400) -> Floats:
        rng = np.random.default_rng(seed)
        return np.asarray(1.0 + rng.normal(scale=0.02, size=n) + np.where(np.arange(n) < warmup, 1.0, 0.0))

    @pytest.mark.parametrize("planted", [5, 20, 60, 150])
    @pytest.mark.parametrize("seed", range(5))
    def test_a_planted_warmup_is_found(self, planted: int, seed: int) -> None:
        found = warmup_length(self.series(planted, seed))
        assert found is not None
        assert planted <= found <= planted + 60

    def test_a_steady_series_loses_little(self) -> None:
        lost = [warmup_length(self.series(0, seed)) for seed in range(40)]
        assert np.median([cut for cut in lost if cut is not None]) <= 40

    def test_what_never_settles_has_no_warmup_length(self) -> None:
        assert warmup_length(np.linspace(1.0, 0.0, 400)) is None

    def test_too_short_to_tell(self) -> None:
        assert warmup_length(np.ones(19)) is None
        assert warmup_length(np.ones(20)) == 0


def one_session(blocks: Floats, draws: int, rng: np.random.Generator) -> Floats:
    return bootstrap_means(blocks, np.zeros(len(blocks), dtype=np.int64), draws, rng)


class TestBootstrap:
    """Draws of a mean lie as Student's interval does, also for two or three units."""

    @pytest.mark.parametrize("n", [2, 3, 5, 20])
    def test_its_90_percent_are_students(self, n: int) -> None:
        rng = np.random.default_rng(11)
        blocks = rng.normal(size=(n, 2))
        drawn = one_session(blocks, 40_000, rng)
        for column in range(2):
            expected = student_interval(blocks[:, column], 0.90)
            low, high = np.quantile(drawn[:, column], [0.05, 0.95])
            assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.03 * expected.half_width)
            assert drawn[:, column].mean() == pytest.approx(expected.mean, abs=0.03 * expected.half_width)

    def test_the_check_fails_for_the_plain_bootstrap(self) -> None:
        """The control: 90 % of plain resamples of 5 blocks are narrower than Student's by a third."""
        rng = np.random.default_rng(11)
        blocks = rng.normal(size=5)
        plain = blocks[rng.integers(0, 5, size=(40_000, 5))].mean(axis=1)
        low, high = np.quantile(plain, [0.05, 0.95])
        assert (high - low) / 2 < 0.75 * student_interval(blocks, 0.90).half_width

    def test_columns_are_drawn_together(self) -> None:
        rng = np.random.default_rng(1)
        first = rng.normal(10.0, size=10)
        drawn = one_session(np.stack([first, 3.0 * first], axis=1), 500, rng)
        assert drawn[:, 1] / drawn[:, 0] == pytest.approx(np.full(500, 3.0))

    def test_correlation_is_kept(self) -> None:
        rng = np.random.default_rng(1)
        blocks = rng.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], size=200)
        expected = np.corrcoef(blocks.T)[0, 1]
        assert np.corrcoef(one_session(blocks, 40_000, rng).T)[0, 1] == pytest.approx(expected, abs=0.01)

    def test_sessions_are_the_units(self) -> None:
        """Three sessions of 4 blocks each draw as their three means do, however far blocks lie apart within."""
        means = np.array([[1.0], [2.0], [4.0]])
        blocks = (means[:, np.newaxis] + np.array([-9.0, -1.0, 1.0, 9.0])[:, np.newaxis]).reshape(12, 1)
        sessions = np.repeat([5, 7, 6], 4)
        drawn = bootstrap_means(blocks, sessions, 1000, np.random.default_rng(3))
        turned = bootstrap_means(blocks[::-1], sessions[::-1], 1000, np.random.default_rng(3))
        of_means = one_session(means[[0, 2, 1]], 1000, np.random.default_rng(3))
        assert drawn == pytest.approx(of_means)
        assert turned == pytest.approx(drawn)

    def test_sessions_count_alike_however_long_they_are(self) -> None:
        blocks = np.array([[1.0]] * 30 + [[2.0]] * 2)
        drawn = bootstrap_means(blocks, np.repeat([0, 1], [30, 2]), 20_000, np.random.default_rng(1))
        assert np.median(drawn) == pytest.approx(1.5, abs=0.1)

    def test_blocks_alike_have_no_spread(self) -> None:
        assert (one_session(np.full((5, 2), 3.0), 10, np.random.default_rng(0)) == 3.0).all()

    def test_no_draws(self) -> None:
        assert one_session(np.ones((3, 2)), 0, np.random.default_rng(0)).shape == (0, 2)

    def test_the_same_seed_draws_the_same(self) -> None:
        blocks = np.arange(12.0).reshape(6, 2)
        once, again = (one_session(blocks, 5, np.random.default_rng(2)) for _ in range(2))
        assert once.tolist() == again.tolist()

    @pytest.mark.parametrize("n", [0, 1])
    def test_one_block_has_no_spread_to_draw_from(self, n: int) -> None:
        with pytest.raises(EvidenceError, match="too few blocks"):
            one_session(np.ones((n, 2)), 10, np.random.default_rng(0))
