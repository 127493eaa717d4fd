"""``b2g simulate`` end to end: whole outputs, tables, pictures, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from builders import calibration, point

from b2gmodel.cli import run
from b2gmodel.records import Estimate, TransportLaw, TransportPoint
from b2gmodel.store import write_record, write_table

CONSTANT = ["simulate", "--service", "1ms", "--transport", "3ms", "-k", "2"]


def test_a_constant_cycle_in_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CONSTANT, "--flights", "4"]) == 0
    assert capsys.readouterr().out == (
        "X = 2000 request/s\n"
        "point  X, request/s          95 %  mean, ms  P50  P95  P99"
        "  GPU busy              95 %  at GPU    95 %  rejected  95 %\n"
        "-              2000  2000 to 2000         4    4    4    4"
        "    100.0%  100.0% to 100.0%       1  1 to 1         -     -\n"
    )


def test_a_sweep_to_tables_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, parquet, figure = tmp_path / "x.csv", tmp_path / "x.parquet", tmp_path / "x.svg"
    arguments = [*CONSTANT, "--service-cv", "0.5", "--sweep", "flights=1,2,4", "--sweep", "instances=1,2", "-q"]
    assert run([*arguments, "--out", str(csv), "--figure", str(figure)]) == 0
    assert run([*arguments, "--out", str(parquet), "--executor", "joblib"]) == 0
    capsys.readouterr()
    frame = pd.read_parquet(parquet).drop(columns="refused")
    pd.testing.assert_frame_equal(pd.read_csv(csv).drop(columns="refused"), frame, check_dtype=False)
    assert frame["flights"].tolist() == [1, 1, 2, 2, 4, 4]
    for name in ("throughput_per_s", "gpu_utilisation", "gpu_queue", "transport_queue"):
        assert (frame[f"{name}_low"] <= frame[name]).all()
        assert (frame[name] <= frame[f"{name}_high"]).all()
    assert figure.read_text(encoding="utf-8").startswith("<?xml")


def test_json_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "gantt.svg"
    assert run([*CONSTANT, "--flights", "2", "--trace", str(trace), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["files"] == [str(trace)]
    (point,) = answer["points"]
    assert point["engine"] == "kernel"
    assert point["throughput_per_s"] == pytest.approx(1000.0, rel=1e-6)
    assert trace.stat().st_size > 1000


def test_a_bounded_queue_rejects(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--service", "1ms", "--transport", "1ms", "--service-cv", "1", "--rate", "1500"]
    assert run([*arguments, "--flights", "4", "--queue-limit", "4", "--precision", "0.02", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["engine"] == "reference"
    assert 0.3 < point["rejected_share_low"] < point["rejected_share"] < point["rejected_share_high"] < 0.45
    assert 0.9 < point["gpu_utilisation_low"] < point["gpu_utilisation_high"] <= 1.0
    assert 0 < point["gpu_queue_low"] < point["gpu_queue"] < point["gpu_queue_high"] < 4
    assert point["throughput_per_s"] < 1010


def test_without_a_limit_none_can_be_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--service", "1ms", "--transport", "1ms", "--rate", "500", "-k", "2", "--flights", "4"]
    for limit, rejected in (([], None), (["--queue-limit", "500"], 0.0)):
        assert run([*arguments, *limit, "--json"]) == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        assert point["rejected_share"] == rejected


@pytest.mark.parametrize("engine", [["--service-cv", "1"], ["--service-cv", "1", "--queue-limit", "1000"]])
def test_a_long_run_says_how_far_it_is(engine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A line each time that it has to be twice as long, with the time left; nothing where it shall be quiet."""
    arguments = ["simulate", "--service", "1ms", "--transport", "0ms", "--rate", "600", *engine]
    assert run([*arguments, "--precision", "0.04"]) == 0
    *_, before, last = capsys.readouterr().err.splitlines()
    stage = re.compile(r" +\d+%  to (\d+) cycles(, about \d+ s left)?")
    assert (found := stage.fullmatch(last)) is not None
    assert (earlier := stage.fullmatch(before)) is not None
    assert int(found[1]) == 2 * int(earlier[1])
    assert found[2] is not None
    assert run([*arguments, "--precision", "0.2", "-q"]) == 0
    assert capsys.readouterr().err == ""


SLOW = ["--service", "1ms", "--transport", "0ms", "--precision", "0.001", "--sweep", "rate_per_s=100,200,990"]


@pytest.mark.parametrize("executor", ["serial", "joblib"])
def test_ctrl_c_keeps_the_points_that_have_ended(executor: str, tmp_path: Path) -> None:
    """The third point takes far longer than the others; the signal goes to all processes, as from a terminal."""
    table = tmp_path / "x.csv"
    program = [sys.executable, "-m", "b2gmodel", "simulate", *SLOW, "--executor", executor, "--out", str(table)]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        said = next((line for line in process.stderr if "2 of 3 points" in line), None)
        assert said is not None
        os.killpg(process.pid, signal.SIGINT)
        errors, out = process.stderr.read(), process.stdout.read()
    assert (process.returncode, errors) == (130, "b2g: interrupted\n")
    assert f"wrote {table}" in out
    rows = pd.read_csv(table)
    assert rows["rate_per_s"].tolist() == [100, 200]
    assert rows["response_s"].notna().all()


def test_an_interruption_before_the_first_point_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("b2gmodel.sim.question.answer", interrupt)
    table = tmp_path / "x.csv"
    assert run([*CONSTANT, "--out", str(table)]) == 130
    assert capsys.readouterr() == ("", "b2g: interrupted\n")
    assert not table.exists()


def test_overload_has_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--service", "1ms", "--transport", "0ms", "--service-cv", "1", "--rate", "1500"]
    assert run([*arguments, "--most-cycles", "100000"]) == 3
    out, err = capsys.readouterr()
    assert "no steady state was reached" in out
    assert "no point has an answer" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["simulate", "--service", "1ms"], "--transport"),
        ([*CONSTANT, "--sweep", "colour=1"], "not a parameter"),
        ([*CONSTANT, "--sweep", "flights"], "not a sweep"),
        ([*CONSTANT, "--sweep", "flights=a"], "not a list of numbers"),
        ([*CONSTANT, "--out", "x.xls"], "not a kind of table"),
        ([*CONSTANT, "--executor", "cloud"], "not an executor"),
        ([*CONSTANT, "--executor", "dask"], "scheduler"),
        ([*CONSTANT, "--figure", "x.png"], "needs a sweep"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def a_calibration(folder: Path, *, law: bool = False, cycles: bool = False) -> Path:
    """S = 10 ms, D = 15 ms, k = 8; with a transport that carries no more than two at once, or its cycles."""
    one = point()
    if law:
        rate = [(1, 60.0), (2, 120.0), (4, 120.0)]
        points = tuple(
            TransportPoint(
                flights=flights,
                batches_per_s=Estimate(mean=rate_per_s),
                cycle_s=flights / rate_per_s,
                service_s=1e-9,
                queue_s=0.0,
                transport_s=flights / rate_per_s,
            )
            for flights, rate_per_s in rate
        )
        one = one.model_copy(update={"transport_law": TransportLaw(null_model="n", k=8, batch_bytes=1, points=points)})
    record = calibration(one)
    if cycles:
        rows = {"k": [8] * 3, "warmup": [True, False, False]}
        rows |= {"transport_ns": [10**9, 12 * 10**6, 18 * 10**6], "service_ns": [10**9, 12 * 10**6, 8 * 10**6]}
        record = record.model_copy(update={"raw": write_table(folder / "cal.parquet", rows)})
    return write_record(folder / "cal.json", record)


def the_point(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    (only,) = json.loads(capsys.readouterr().out)["points"]
    assert isinstance(only, dict)
    return only


def test_a_calibration_gives_s_and_d(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(a_calibration(tmp_path)), "--flights", "2", "--json"]) == 0
    assert the_point(capsys)["throughput_per_s"] == pytest.approx(2 * 8 / 0.025, rel=1e-6)


def test_a_measured_transport_binds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model alone would make 100 batches a second with one instance; transport shares 80, then 60 of it."""
    path = a_calibration(tmp_path, law=True)
    assert run(["simulate", str(path), "--flights", "1", "--json"]) == 0
    assert the_point(capsys)["throughput_per_s"] == pytest.approx(8 / 0.025, rel=1e-6)
    assert run(["simulate", str(path), "--flights", "8", "--instances", "4", "--json"]) == 0
    assert the_point(capsys)["throughput_per_s"] == pytest.approx(8 * 120, rel=0.01)


def test_measured_cycles_are_resampled_without_their_warmup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_calibration(tmp_path, cycles=True)
    assert run(["simulate", str(path), "--flights", "1", "--json"]) == 0
    row = the_point(capsys)
    assert row["throughput_per_s"] == pytest.approx(8 / 0.025, rel=0.02)
    # The two measured cycles are 24 and 26 ms long.
    assert row["p99_s"] == pytest.approx(0.026, rel=1e-3)


def test_changed_cycles_are_evidence_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_calibration(tmp_path, cycles=True)
    (tmp_path / "cal.parquet").write_bytes(b"something else")
    assert run(["simulate", str(path), "--json"]) == 3
    assert "not those of the calibration" in capsys.readouterr().err
