"""The figure shows what the records hold: read from its axes, not from its pixels."""

from __future__ import annotations

from pathlib import Path

import builders
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from b2gmodel.errors import UsageError
from b2gmodel.placement_records import StudyVerdict
from b2gmodel.records import Calibration, Estimate, Measurement, Prediction
from b2gmodel.report.figure import _draw_case, draw_throughput
from b2gmodel.report.placements import draw_placements
from b2gmodel.store import read_record

CURVE = {1: [310.0, 330.0], 2: [580.0, 600.0], 3: [690.0, 710.0], 4: [680.0, 690.0]}


def drawn(prediction: Prediction, measured: Measurement) -> Axes:
    panel = Figure().subplots()
    _draw_case(panel, prediction, measured)
    return panel


@pytest.fixture
def prediction() -> Prediction:
    return builders.prediction()


def test_the_measured_curve_has_its_intervals(prediction: Prediction) -> None:
    panel = drawn(prediction, builders.measurement(prediction, CURVE))
    (bars,) = panel.containers
    data, _, (whiskers,) = bars
    assert data.get_xdata().tolist() == [1, 2, 3, 4]
    assert data.get_ydata().tolist() == [320, 590, 700, 685]
    heights = [float(np.ptp(segment[:, 1])) for segment in whiskers.get_segments()]
    # Two sessions 20 apart: half-width t(1, 0.95) * 14.14 / sqrt(2) = 63.14.
    assert heights == pytest.approx([2 * 63.14, 2 * 63.14, 2 * 63.14, 63.14], rel=1e-3)


def test_the_prediction_is_a_curve_and_a_dashed_line_at_m_star(prediction: Prediction) -> None:
    panel = drawn(prediction, builders.measurement(prediction, CURVE))
    lines = {str(line.get_label()): line for line in panel.get_lines()}
    predicted = lines["predicted (closed-form, upper bound)"]
    assert np.asarray(predicted.get_xdata()).tolist() == [1, 2, 3, 4]
    assert np.asarray(predicted.get_ydata()).tolist() == pytest.approx([320, 640, 800, 800])
    dashed = lines["predicted M* = 3"]
    assert (np.asarray(dashed.get_xdata()).tolist(), dashed.get_linestyle()) == ([3, 3], "--")


def test_the_baseline_is_there_where_it_was_measured(prediction: Prediction) -> None:
    def labels(baseline: float | None) -> set[str]:
        panel = drawn(prediction, builders.measurement(prediction, CURVE, baseline=baseline))
        legend = panel.get_legend()
        assert legend is not None
        return {text.get_text() for text in legend.get_texts()}

    assert labels(200.0) - labels(None) == {"without batching (C1)"}
    assert labels(None) == {"predicted (closed-form, upper bound)", "predicted M* = 3", "measured, 90 % interval"}


def test_one_session_has_no_intervals_and_says_so(prediction: Prediction) -> None:
    panel = drawn(prediction, builders.measurement(prediction, {1: [320.0], 3: [700.0]}))
    legend = panel.get_legend()
    assert legend is not None
    assert "measured" in {text.get_text() for text in legend.get_texts()}


def test_title_and_axes(prediction: Prediction) -> None:
    panel = drawn(prediction, builders.measurement(prediction, CURVE))
    assert panel.get_title() == "m, 0 KiB a request, emulated compute"
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("batches in flight M", "throughput X, request/s")
    assert panel.get_ylim()[0] == 0
    real = builders.prediction(builders.calibration(model=builders.model_info(compute="real")))
    assert "emulated" not in drawn(real, builders.measurement(real, CURVE)).get_title()


MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


@pytest.mark.parametrize("ending", MAGIC)
def test_it_is_written_in_the_kind_of_its_ending(prediction: Prediction, tmp_path: Path, ending: str) -> None:
    path = tmp_path / "new" / f"figure{ending}"
    cases = [(prediction, builders.measurement(prediction, CURVE))] * 2
    draw_throughput(cases, path)
    assert path.read_bytes().startswith(MAGIC[ending])
    draw_throughput(cases[:1], path)  # an existing figure is replaced
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["figure", "figure.jpg", "figure.PNG", ".png"])
def test_another_ending_is_refused(prediction: Prediction, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"not a kind of figure: saw .*; allowed: \.png, \.svg, \.pdf"):
        draw_throughput([(prediction, builders.measurement(prediction, CURVE))], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(prediction: Prediction, tmp_path: Path) -> None:
    case = [(prediction, builders.measurement(prediction, CURVE))]
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder.png", tmp_path / "file" / "figure.png", Path("/proc/figure.png")):
        with pytest.raises(UsageError, match="cannot write the fi"):
            draw_throughput(case, path)


def test_a_map_in_which_no_payload_loses_is_laid_out(tmp_path: Path) -> None:
    """All measured marks of one kind: matplotlib's layout must not collapse, which it would say by a warning."""
    folder = Path(__file__).parents[1] / "calibration" / "local" / "crossover"
    file = min((folder / "predictions").glob("*verdict*.json"))
    verdict = read_record(file, StudyVerdict)
    won = tuple(cell.model_copy(update={"gain": Estimate(mean=0.1)}) for cell in verdict.cells)
    kept = [read_record(path, Calibration) for path in (folder / "calibration").glob("*.json")]
    calibrations = {
        cell.workload: next(each for each in kept if each.name == cell.predicted.calibration_name)
        for cell in verdict.cells
        if cell.predicted is not None
    }
    draw_placements(verdict.model_copy(update={"cells": won}), calibrations, tmp_path / "map.svg")
