"""Published sweeps of real servers: one row each predicts the rest; the page is what its command makes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

from b2gmodel.errors import EvidenceError
from b2gmodel.report.sweeps import (
    Near,
    Score,
    Sweep,
    SweepPoint,
    calibration_of,
    missing,
    near,
    read_sweeps,
    reasons,
    score,
)
from b2gmodel.report.sweeps_page import draw_panel, page, score_all

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "calibration" / "public" / "public_sweeps.json"
PAGE = ROOT / "docs" / "public-sweeps.md"
TIMES = [name for name in SweepPoint.model_fields if name.endswith("_us")]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_public", KEPT.parent / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scores() -> dict[str, Score]:
    return {each.sweep.id: each for each in score_all(read_sweeps(KEPT))}


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """A copy of the kept file, with a change."""

    def edit(change: Callable[[Any], None]) -> Path:
        content = json.loads(KEPT.read_text(encoding="utf-8"))
        change(content)
        path = tmp_path / "sweeps.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return edit


def row(concurrency: int, throughput_per_s: float, **times_us: float) -> dict[str, Any]:
    stated = {"concurrency": concurrency, "throughput_infer_per_s": throughput_per_s}
    return stated | dict.fromkeys(TIMES) | times_us


def sweep(*rows: dict[str, Any], instances: int = 1, **changes: Any) -> Sweep:
    fields = {
        "id": "s", "source": "s", "tool": "t", "server": "s", "model": "m", "hardware": None, "protocol": None,
        "batch_size": 1, "instances": instances, "instances_inferred": False, "dynamic_batching": False,
        "shared_memory": None, "colocated": True, "percentile_or_avg": "avg", "points": rows, "notes": "",
    }  # fmt: skip
    return Sweep.model_validate_json(json.dumps(fields | changes))


# C = 10 ms, S = 1 + 5 + 2 = 8 ms: M* = 2, 100 request/s alone, at most 125.
ALONE = row(1, 100.0, latency_avg_us=10_000.0, compute_input_us=1000.0, compute_infer_us=5000.0, compute_output_us=2000)


def test_the_page_is_what_the_command_makes(maker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert page(read_sweeps(KEPT)) == PAGE.read_text(encoding="utf-8")
    assert maker.main(["--check"]) == 0
    assert capsys.readouterr().out == "public-sweeps.md: as made\n"
    assert PAGE.with_suffix(".svg").is_file()


def test_the_command_writes_page_and_figure(maker: ModuleType, tmp_path: Path) -> None:
    made = tmp_path / "public-sweeps.md"
    assert maker.main([], page_file=made) == 0
    assert made.read_bytes() == PAGE.read_bytes()
    assert made.with_suffix(".svg").read_bytes().startswith(b"<?xml")
    assert maker.main([], page_file=made) == 0


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_changed_row_shows(
    concurrency: int,
    maker: ModuleType,
    edited: Callable[[Callable[[Any], None]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def change(content: Any) -> None:
        point = content["sweeps"][8]["points"][concurrency - 1]
        point["throughput_infer_per_s"] *= 1.1

    assert maker.main(["--check"], edited(change)) == 1
    assert "not what the command makes" in capsys.readouterr().out


def test_later_rows_do_not_reach_the_prediction(
    edited: Callable[[Callable[[Any], None]], Path], scores: dict[str, Score]
) -> None:
    def change(content: Any) -> None:
        for each in content["sweeps"]:
            for point in each["points"]:
                if point["concurrency"] > 1:
                    point["throughput_infer_per_s"] *= 3.0
                    point.update(dict.fromkeys(TIMES, 7.0))

    changed = score_all(read_sweeps(edited(change)))
    assert [each.prediction for each in changed] == [each.prediction for each in scores.values()]


def test_a_hand_computed_sweep() -> None:
    scored = score(sweep(ALONE, row(2, 120.0), row(4, 122.0)))
    assert (scored.m_star, scored.smallest_near, scored.at_twice.flights) == (2, 2, 2)
    assert scored.height_per_s == pytest.approx(125.0)
    assert scored.errors["closed-form"] == pytest.approx({1: 0.0, 2: 125 / 120 - 1, 4: 125 / 122 - 1})
    assert scored.at_m_star.regret == pytest.approx(1 - 120 / 122)
    assert (scored.is_place_held, scored.is_height_held) == (True, True)


def test_nothing_is_interpolated() -> None:
    swept = sweep(ALONE, row(4, 80.0), row(8, 200.0))
    assert near(swept, 4) == Near(4, (4, 0.6), (4, 0.6))
    assert near(swept, 5) == Near(5, (4, 0.6), (8, 0.0))
    assert near(swept, 9) == Near(9, (8, 0.0), None)
    assert near(swept, 5).regret is None
    assert score(swept).is_place_held is None


def test_what_the_first_row_lacks_is_not_guessed() -> None:
    lacking = {
        "no row at concurrency 1": sweep(row(2, 100.0)),
        "no compute time at concurrency 1": sweep(row(1, 100.0, latency_avg_us=1.0)),
        "no mean latency at concurrency 1": sweep(row(1, 100.0, compute_infer_us=1.0)),
    }
    for lack, swept in lacking.items():
        assert missing(swept) == lack
        with pytest.raises(EvidenceError, match=lack):
            calibration_of(swept)
    assert {each.id for each in read_sweeps(KEPT).sweeps if missing(each)} == {
        "doc-inception-graphdef-2020-log",
        "panet-fp16-aws",
    }


def test_the_calibration_holds_means_alone() -> None:
    (point,) = calibration_of(sweep(ALONE, instances=2)).points
    assert (point.k, point.blocks, point.transport_law, point.compute_law) == (1, None, None, None)
    assert point.cycle_s is not None
    assert point.service_s is not None
    assert (point.cycle_s.mean, point.service_s.mean) == pytest.approx((0.010, 0.008))


def test_reasons_have_their_evidence() -> None:
    """At M = 4, X S = 250 x 16 ms: four requests in service, in twice the time of one."""
    merged = sweep(ALONE, row(4, 250.0, compute_infer_us=16_000.0), dynamic_batching=True)
    (why,) = reasons(score(merged))
    assert "4.0 requests were in service at once on an instance, in 2.0 times S alone: 2.00 times the rate" in why
    assert reasons(score(sweep(ALONE, row(2, 124.0, compute_infer_us=8000.0)))) == ()
    shorter = reasons(score(sweep(ALONE, row(3, 300.0, compute_infer_us=6000.0), instances=2)))
    assert shorter == ("at M = 3 on 2 instances, S is 25 % shorter than alone",)
    assert "X falls by 50 % from M = 2 to 3" in reasons(score(sweep(ALONE, row(2, 120.0), row(3, 60.0))))[0]


def test_what_the_sweeps_say(scores: dict[str, Score]) -> None:
    """The page's main findings, held apart from its wording."""
    assert len(scores) == 22
    plain = [each for each in scores.values() if not each.sweep.dynamic_batching]
    assert all(each.is_place_held for each in plain)
    assert {each.sweep.id for each in plain if not each.is_height_held} == {"catboost-g2", "catboost-g3"}
    merging = [each for each in scores.values() if each.sweep.dynamic_batching and each.sweep.colocated]
    assert all(each.sweep.peak.concurrency > each.m_star for each in merging)


def test_the_figure_has_every_sweep(scores: dict[str, Score]) -> None:
    panel = Figure().subplots()
    draw_panel(panel, list(scores.values()))
    points = {
        (x, y)
        for line in panel.get_lines()
        if line.get_linestyle() == "None"
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert points == {(each.sweep.peak.throughput_infer_per_s, each.height_per_s) for each in scores.values()}
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    labels = {str(line.get_label()) for line in panel.get_lines()}
    assert {"dynamic batching on", "dynamic batching off", "predicted = measured"} <= labels


@pytest.mark.parametrize("damage", [lambda c: c.pop("about"), lambda c: c["sweeps"][0].update(points=[])])
def test_a_damaged_file_is_refused(
    damage: Callable[[Any], None], edited: Callable[[Callable[[Any], None]], Path]
) -> None:
    with pytest.raises(EvidenceError, match="no file of published sweeps"):
        read_sweeps(edited(damage))
