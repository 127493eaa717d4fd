"""The main job on the real Triton, through the command line, and what is left of it when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from b2gmodel.cli import run
from b2gmodel.live.server import EmbeddedServer

pytestmark = pytest.mark.real


def test_calibrate_predict_measure_validate(
    triton: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerant_self_test: None
) -> None:
    url = "http://{}:{}".format(*triton.http_address)
    out, predictions = tmp_path / "calibration", tmp_path / "predictions"

    calibrate = ["calibrate", "--url", url, "--model", "resnet50", "-k", "1,8", "--budget", "3s", "--out", str(out)]
    assert run([*calibrate, "--name", "here", "-q", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["calibrations"][0]
    calibration = written["calibration"]
    assert calibration["model"]["compute"] == "emulated"
    assert [point["k"] for point in calibration["points"]] == [1, 8]

    rows = pq.read_table(out / calibration["raw"]["file"]).to_pylist()
    assert len(rows) == calibration["raw"]["rows"]
    assert all(row["service_ns"] + row["transport_ns"] == row["cycle_ns"] for row in rows)
    assert all(row["cycle_ns"] == row["delivered_ns"] - row["sealed_ns"] for row in rows)
    for point in calibration["points"]:
        kept = [row for row in rows if row["k"] == point["k"]]
        assert point["counters"]["executions"] == len(kept)
        assert point["counters"]["service_s"] == pytest.approx(
            sum(row["service_ns"] for row in kept) / len(kept) / 1e9, rel=0.03
        )

    predict = ["predict", written["file"], "-k", "8", "--predictions", str(predictions)]
    plan = ["--flights", "1,2,4", "--sessions", "2", "--seconds", "0.3s"]
    assert run([*predict, *plan, "--json"]) == 0
    frozen = json.loads(capsys.readouterr().out)
    assert run(["measure", frozen["file"], "--predictions", str(predictions), "-q", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measurement"]
    assert measured["prediction_digest"] == frozen["digest"]
    assert [len(session["runs"]) for session in measured["sessions"]] == [4, 4]

    figure = tmp_path / "x.svg"
    code = run(["validate", frozen["digest"][:8], "--predictions", str(predictions), "--figure", str(figure), "--json"])
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert code == {"held": 0, "refuted": 1, "inconclusive": 3}[verdict["outcome"]]
    assert figure.read_text(encoding="utf-8").startswith("<?xml")
    events = [json.loads(line)["event"] for line in (predictions / "ledger.jsonl").read_text().splitlines()]
    assert events == ["freeze", "begin", "measure", "outcome"]


def test_the_server_must_serve_what_was_calibrated(
    triton: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerant_self_test: None
) -> None:
    url = "http://{}:{}".format(*triton.http_address)
    calibrate = ["calibrate", "--url", url, "--model", "resnet50_null", "-k", "2", "--budget", "2s", "-q"]
    assert run([*calibrate, "--out", str(tmp_path), "--name", "null"]) == 0
    capsys.readouterr()
    assert run(["calibrate", "--url", url, "--model", "resnet51", "--out", str(tmp_path)]) == 2
    assert "it serves: resnet50" in capsys.readouterr().err
    assert run(["calibrate", "--url", url, "--model", "resnet50", "-k", "33", "--out", str(tmp_path)]) == 2
    assert "allowed: 1 to 32" in capsys.readouterr().err


def processes_of(marker: str) -> set[int]:
    """Processes that have ``marker`` in their environment: all that the demo started inherited it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def server_ids_of(marker: str) -> set[str]:
    """The ids, and so the prefixes of shared memory, of the servers among the demo's processes."""
    ids = set()
    for pid in processes_of(marker):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        ids |= {word.removeprefix("--id=") for word in words if word.startswith("--id=")}
    return ids


def wait_until_gone(marker: str, within_s: float) -> set[int]:
    deadline_s = time.monotonic() + within_s
    while (left := processes_of(marker)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("after_s", [1.6, 4.5])
def test_a_killed_demo_leaves_nothing(after_s: float, tmp_path: Path) -> None:
    marker = f"B2G_TEST_MARKER={tmp_path.name}{os.getpid()}"
    key, value = marker.split("=")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    demo = subprocess.Popen(
        [sys.executable, "-m", "b2gmodel", "demo", "--out", str(tmp_path / "demo")],
        env={**os.environ, key: value, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    assert demo.poll() is None
    server_ids = server_ids_of(marker)
    assert server_ids, "the server should be there by now"
    demo.send_signal(signal.SIGKILL)
    demo.wait()
    assert wait_until_gone(marker, within_s=10.0) == set()
    assert list(scratch.iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if name.startswith(tuple(server_ids))] == []
