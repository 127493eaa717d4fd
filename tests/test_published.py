"""The published study as a case: its figures as records, M* = 2 and 4, and the height that is overstated."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from b2gmodel.cli import run
from b2gmodel.records import Calibration
from b2gmodel.store import read_record

PUBLISHED = Path(__file__).parents[1] / "calibration" / "published"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_published", PUBLISHED / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kept_records_are_what_the_script_makes(
    maker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker.main(tmp_path)
    capsys.readouterr()
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in PUBLISHED.glob("*.json") if path.name != "batch2go.json"}
    assert made == kept


def test_nulls_stay_nulls() -> None:
    point = read_record(PUBLISHED / "mobilenetv2.json", Calibration).points[0]
    assert (point.k, point.cycle_s, point.transport_share, point.throughput_per_s) == (None, None, None, None)


@pytest.mark.parametrize(
    ("model", "m_star", "promised", "measured"),
    [("resnet50", 2, 658.8, 581.0), ("yolov8n", 4, 290.3, 144.0)],
)
def test_the_peaks_hold_and_the_height_is_overstated(
    model: str, m_star: int, promised: float, measured: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--predictions", str(tmp_path)]
    assert run(["predict", str(PUBLISHED / f"{model}.json"), *folder, "--json"]) == 0
    frozen = json.loads(capsys.readouterr().out)
    assert frozen["prediction"]["predictors"][0]["m_star"] == m_star
    assert run(["validate", frozen["file"], str(PUBLISHED / f"{model}-measured.json"), *folder, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["outcome"], verdict["best_flights"], verdict["preregistered"]) == ("held", m_star, False)
    at_peak = next(height for height in verdict["heights"] if height["flights"] == m_star)
    assert at_peak["predicted_per_s"] == pytest.approx(promised, abs=0.05)
    assert at_peak["measured_per_s"] == measured


@pytest.mark.parametrize("model", ["mobilenetv2", "yolov5s"])
def test_what_the_study_does_not_state_is_not_predicted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(PUBLISHED / f"{model}.json"), "--predictions", str(tmp_path)]) == 3
    assert "does not state what the closed form needs" in capsys.readouterr().err
    assert not (tmp_path / "ledger.jsonl").exists()
