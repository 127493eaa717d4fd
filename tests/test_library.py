"""b2gmodel as a library: its names, its frames and its reprs."""

from __future__ import annotations

import builders
import pytest

import b2gmodel
from b2gmodel.judge import judge
from b2gmodel.prediction import predict


@pytest.mark.parametrize("name", b2gmodel.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(b2gmodel, name).__doc__
    assert name in dir(b2gmodel)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prediktion'"):
        b2gmodel.prediktion  # noqa: B018


def test_the_name_stays_the_function_when_its_module_is_loaded() -> None:
    import b2gmodel.prediction

    assert b2gmodel.predict is predict is b2gmodel.prediction.predict


def test_frames_have_a_row_a_cell() -> None:
    of = builders.calibration()
    made = builders.prediction(of)
    frame = made.to_frame()
    assert len(frame) == len(made.predictors) * len(made.predictors[0].curve)
    assert frame.loc[frame["predictor"] == "closed-form", "throughput_per_s"].iloc[0] == 320.0
    assert of.to_frame()[["k", "cycle_s", "service_s"]].iloc[0].tolist() == [8, 0.025, 0.010]
    measured = builders.measurement(made, {1: [320.0, 321.0], 2: [600.0, 601.0], 3: [790.0, 791.0]})
    assert len(measured.to_frame()) == 6
    verdict = judge(made, measured)
    assert len(verdict.to_frame()) == len(verdict.heights)


def test_reprs_read_well() -> None:
    of = builders.calibration()
    made = builders.prediction(of)
    assert repr(of).splitlines() == [
        "Calibration cal: m (emulated compute), g = 1, transport http",
        "  k = 8: S = 10 ms, D = 15 ms, transport share 60.0%",
    ]
    first, closed, *_, binding = repr(made).splitlines()
    assert first == "Prediction cal-k8: m (emulated compute), g = 1, k = 8"
    assert closed.startswith("  closed-form (upper bound): M* = 3, X(3) = 800 [")
    assert binding.endswith("no transport law was measured")
    assert str(made) == repr(made)
