"""A measurement as perf_analyzer's CSV, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_bench import Out, complained, said
from foreign_rig import SAMPLES, sample

from b2gmodel.foreign.content import parse_sweep
from b2gmodel.records import Measurement
from b2gmodel.store import read_record, write_record

PUBLISHED = Path(__file__).parents[1] / "calibration" / "published" / "resnet50-measured.json"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def measured(capsys: Out) -> Path:
    said(capsys, "import", str(SAMPLES / "yolo_shm.log"))
    return Path("calibration/yolo_shm-measured.json")


WHOLE = """\
Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,\
Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency
4,213.181,0,2191,109521,0,37299,0,0,144550,170597,179910,211803
3,215.32,0,1843,71799,0,36884,0,0,108822,123455,127765,143690
2,215.358,0,1979,35258,0,37051,0,0,72741,83965,87828,96996
6,222.029,0,1992,177479,0,36007,0,0,212215,236014,265460,277859
5,224.3,0,1923,140129,0,35535,0,0,175675,191674,200259,241365
1,228.674,0,632,44,0,34165,0,0,33842,38386,39441,44325
"""


def test_whole(measured: Path, capsys: Out) -> None:
    assert said(capsys, "export", str(measured)) == (0, WHOLE)


def test_there_and_back(measured: Path, capsys: Out) -> None:
    assert said(capsys, "export", str(measured), "--out", "back.csv") == (
        0,
        "6 row(s) written: back.csv\n"
        "  S stands under Server Compute Infer; sending and receiving are within Network\n"
        "next: b2g import back.csv\n",
    )
    said(capsys, "import", "back.csv")
    first, again = (
        read_record(Path(f"calibration/{name}-measured.json"), Measurement).sessions[0].runs
        for name in ("yolo_shm", "back")
    )
    for run, other in zip(first, again, strict=True):
        assert (run.flights, run.throughput_per_s) == (other.flights, other.throughput_per_s)
        assert run.cycle_s is not None
        assert other.cycle_s is not None
        assert other.cycle_s.mean == pytest.approx(run.cycle_s.mean, abs=2e-6)
        assert other.service_s == pytest.approx(run.service_s, abs=1e-6)
        assert other.queue_s == pytest.approx(run.queue_s, abs=1e-6)


def test_the_header_is_the_clients_own() -> None:
    verbose = sample("yolo_shm.csv").splitlines()[0]
    assert verbose.startswith(WHOLE.splitlines()[0])


def test_what_is_not_stated_is_left_out(capsys: Out) -> None:
    code, out = said(capsys, "export", str(PUBLISHED))
    assert (code, out) == (0, "Concurrency,Inferences/Second,Client Send,Client Recv\n1,448,0,0\n2,581,0,0\n")
    rows = parse_sweep(out, "f").rows
    assert [(row.concurrency, row.throughput_per_s, row.service_s) for row in rows] == [(1, 448, None), (2, 581, None)]
    code, out = said(capsys, "export", str(PUBLISHED), "--json")
    assert json.loads(out)["notes"] == [
        "left out: C1, which keep no number of batches in flight",
        "no server columns: the runs do not state C and S",
    ]


def test_means_over_sessions(measured: Path, capsys: Out) -> None:
    record = read_record(measured, Measurement)
    (session,) = record.sessions
    faster = session.model_copy(
        update={"runs": tuple(r.model_copy(update={"throughput_per_s": r.throughput_per_s + 2}) for r in session.runs)}
    )
    write_record(Path("two.json"), record.model_copy(update={"sessions": (session, faster)}))
    out = said(capsys, "export", "two.json")[1]
    assert parse_sweep(out, "f").rows[0].throughput_per_s == pytest.approx(229.674)


def test_a_negative_difference_is_cut_off_and_said(measured: Path, capsys: Out) -> None:
    record = read_record(measured, Measurement)
    (session,) = record.sessions
    runs = [run.model_copy(update={"service_s": 0.06 if run.flights == 1 else run.service_s}) for run in session.runs]
    changed = record.model_copy(update={"sessions": (session.model_copy(update={"runs": tuple(runs)}),)})
    write_record(Path("negative.json"), changed)
    assert json.loads(said(capsys, "export", "negative.json", "--json")[1])["notes"][-1] == (
        "network cut off at 0, so that C cannot be read back, at M = 1"
    )


def test_refusals(measured: Path, capsys: Out) -> None:
    code, line = complained(capsys, "export", "calibration/yolo_shm.json")
    assert (code, "this file is no such record" in line) == (2, True)
    code, line = complained(capsys, "export", str(SAMPLES / "yolo_shm.csv"))
    assert (code, "damaged or truncated" in line) == (3, True)
    Path("there.csv").write_text("kept", encoding="utf-8")
    code, line = complained(capsys, "export", str(measured), "--out", "there.csv")
    assert (code, "the file exists" in line, Path("there.csv").read_text(encoding="utf-8")) == (2, True, "kept")
    record = read_record(measured, Measurement)
    (session,) = record.sessions
    alone = session.model_copy(update={"runs": (session.runs[0].model_copy(update={"placement": "C1"}),)})
    write_record(Path("c1.json"), record.model_copy(update={"sessions": (alone,)}))
    code, line = complained(capsys, "export", "c1.json")
    assert (code, "nothing to export: no run of C3 or C4: saw 'C1'" in line) == (3, True)
