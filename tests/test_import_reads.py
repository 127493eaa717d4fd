"""Other tools' files as rows, records and answers: the kept samples, forms of theirs, and what else they show."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from cli_bench import Out, said
from foreign_rig import ALONE, SAMPLES, TABLE, TIMES, TWO, cell, log, log_row, plain, profile, sample, table

from b2gmodel.cli import run
from b2gmodel.foreign.answer import answer_of
from b2gmodel.foreign.content import parse_sweep, recognise
from b2gmodel.foreign.enough import usable
from b2gmodel.foreign.findings import findings_of
from b2gmodel.foreign.join import join
from b2gmodel.foreign.rows import Kind, Sweep
from b2gmodel.records import Calibration, Measurement
from b2gmodel.store import read_record


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def swept(*texts: str, batch_size: int | None = None) -> Sweep:
    return usable(join([parse_sweep(text, f"file{n}") for n, text in enumerate(texts)], batch_size))


def names(sweep: Sweep, payload_bytes: int | None = None) -> set[str]:
    return {each.name for each in findings_of(sweep, payload_bytes)}


class TestRows:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [("resnet_http.csv", Kind.CSV), ("dyn_http.log", Kind.LOG), ("yolo_shm.json", Kind.PROFILE)],
    )
    def test_the_kind_is_seen_in_the_content(self, name: str, kind: Kind) -> None:
        assert recognise(sample(name)) is kind

    def test_a_table_is_seen_and_prose_is_not(self) -> None:
        assert recognise(table()) is Kind.TABLE
        assert recognise("Concurrency and throughput rose together.") is None

    def test_a_verbose_row(self) -> None:
        row = parse_sweep(sample("resnet_http.csv"), "f").alone
        assert row is not None
        assert row.latency_s == pytest.approx(22_981e-6)
        assert row.service_s == pytest.approx((976 + 13_903 + 245) * 1e-6)
        assert (row.queue_s, row.network_s) == (pytest.approx(79e-6), pytest.approx(4127e-6))

    def test_a_plain_row_adds_up_to_its_latency(self) -> None:
        row = parse_sweep(plain(ALONE), "f").alone
        assert row is not None
        assert row.latency_s == pytest.approx(10e-3)
        assert row.service_s == pytest.approx(6e-3)

    def test_log_and_csv_of_one_run_agree_but_for_rounding(self) -> None:
        for name in ("resnet_http", "yolo_shm", "dyn_http"):
            log_rows = parse_sweep(sample(f"{name}.log"), "f").rows
            for row, other in zip(parse_sweep(sample(f"{name}.csv"), "f").rows, log_rows, strict=True):
                assert (row.concurrency, row.throughput_per_s) == (other.concurrency, other.throughput_per_s)
                assert (row.latency_s, row.service_s) == (other.latency_s, other.service_s)

    def test_a_profile_counts_what_the_client_reported(self) -> None:
        """Of 267 requests at concurrency 2 the client's report counts the 194 of its last three windows."""
        profiled, logged = parse_sweep(sample("yolo_shm.json"), "f"), parse_sweep(sample("yolo_shm.log"), "f")
        assert [row.batches for row in profiled.rows] == [row.batches for row in logged.rows]
        for row, other in zip(profiled.rows, logged.rows, strict=True):
            assert row.throughput_per_s * 8 == pytest.approx(other.throughput_per_s, rel=1e-5)
            assert row.latency_s == pytest.approx(other.latency_s, abs=1e-6)
            assert row.latency_cv == pytest.approx(other.latency_cv, rel=1e-3)

    def test_a_verbose_log_shows_passes_that_are_no_rows(self) -> None:
        passes = "  Pass [1] throughput: 50 infer/sec. Avg latency: 9 usec (std 1 usec). \n"
        text = log(log_row(1, 99, 10_000).replace("  Client:", passes + "  Client:"), log_row(2, 160, 12_500))
        assert (
            parse_sweep(text, "f").rows == parse_sweep(log(log_row(1, 99, 10_000), log_row(2, 160, 12_500)), "f").rows
        )

    def test_a_table_row_in_milliseconds(self) -> None:
        text = table("m,8,1,m_config_0,2:GPU + 1:CPU,64,Yes,600.0,14.0,13.0,0.5,1.0,4.0,1.0")
        sweep = parse_sweep(text, "f")
        row = sweep.alone
        assert row is not None
        assert (row.latency_s, row.service_s) == (pytest.approx(13e-3), pytest.approx(6e-3))
        assert (sweep.batch_size, sweep.instances, sweep.max_batch_size, sweep.model) == (8, 3, 64, "m")

    def test_gpu_columns_and_a_byte_order_mark_do_no_harm(self, here: Path, capsys: Out) -> None:
        text = plain(ALONE + ",GPU-0:0.8;", header=plain().strip() + ",Avg GPU Utilization")
        Path("s.csv").write_text(text, encoding="utf-8-sig")
        assert said(capsys, "import", "s.csv")[0] == 0


class TestBatchSize:
    @pytest.mark.parametrize(("name", "k"), [("resnet_http.csv", 8), ("yolo_shm.csv", 8), ("dyn_http.csv", 1)])
    def test_it_follows_from_the_first_row_of_the_samples(self, name: str, k: int) -> None:
        assert swept(sample(name)).batch_size == k

    def test_of_64_several_would_fit(self, here: Path, capsys: Out) -> None:
        Path("s.csv").write_text(plain(cell(ALONE, "Inferences/Second", 99 * 64)), encoding="utf-8")
        assert run(["import", "s.csv"]) == 2
        assert "--batch-size K" in capsys.readouterr().err
        assert said(capsys, "import", "s.csv", "--batch-size", "64")[0] == 0

    def test_a_profile_takes_it_from_the_file_beside_it(self) -> None:
        joined = swept(sample("yolo_shm.json"), sample("yolo_shm.csv"))
        row = joined.at(2)
        assert row is not None
        assert (joined.batch_size, row.batches, row.service_s) == (8, 194, pytest.approx(37.051e-3))


class TestFindings:
    """Each with the file that does not show it."""

    def test_merging_is_shown_by_executions(self) -> None:
        merging = swept(log(log_row(1, 99, 10_000), log_row(4, 400, 10_000, executions=40)), batch_size=1)
        assert "dynamic-batching" in names(merging)
        assert "dynamic-batching" not in names(swept(log(log_row(1, 99, 10_000), log_row(4, 150, 25_000))))
        (found,) = [each for each in findings_of(swept(sample("dyn_http.log"))) if each.name == "dynamic-batching"]
        assert (found.is_shown, found.blocks) == (True, True)
        assert found.observed == "4795 requests in 639 executions at M = 16"

    def test_merging_is_suspected_from_times(self) -> None:
        (found,) = [each for each in findings_of(swept(sample("dyn_http.csv"))) if each.name == "dynamic-batching"]
        assert (found.is_shown, found.blocks) == (False, True)
        assert "dynamic-batching" not in names(swept(sample("resnet_http.csv")))

    def test_several_instances_where_s_does_not_grow(self) -> None:
        two = swept(plain(ALONE, cell(TWO, "Inferences/Second", 195)))
        assert "several-instances" in names(two)
        assert answer_of(two, findings_of(two)).m_star is None
        stated = replace(two, instances=2)
        assert "several-instances" not in names(stated)
        assert answer_of(stated, findings_of(stated)).m_star == 4
        assert "several-instances" not in names(swept(plain(ALONE, TWO)))

    def test_instances_are_shown_where_executions_are_counted(self) -> None:
        found = findings_of(swept(log(log_row(1, 99, 10_000), log_row(2, 198, 10_000))))
        assert [(each.name, each.is_shown) for each in found if each.blocks] == [("several-instances", True)]

    def test_shared_memory_by_settings_rate_and_share(self) -> None:
        text = log(log_row(1, 99, 10_000), log_row(2, 160, 12_500))
        assert "shared-memory" not in names(swept(text))
        shown = findings_of(swept("$ perf_analyzer --shared-memory=system\n" + text))
        assert [each.is_shown for each in shown if each.name == "shared-memory"] == [True]
        assert "shared-memory" not in names(swept("$ perf_analyzer --shared-memory none\n" + sample("yolo_shm.log")))
        assert "shared-memory" in names(swept(sample("yolo_shm.csv")))
        assert "shared-memory" in names(swept(sample("yolo_shm.csv")), 4800 * 1024)
        assert "shared-memory" not in names(swept(sample("yolo_shm.csv")), 1024)
        assert "shared-memory" not in names(swept(sample("resnet_http.csv")), 588 * 1024)

    def test_rows_that_did_not_stabilise_are_left_out(self) -> None:
        words = "Failed to obtain stable measurement within 10 measurement windows for concurrency 3. Please try\n"
        unstable = swept(log(log_row(1, 99, 10_000), log_row(2, 160, 12_500), log_row(3, 999, 3_000) + words))
        assert ([row.concurrency for row in unstable.rows], unstable.unstable) == ([1, 2], (3,))
        assert "unstable" in names(unstable)
        unreported = swept(log(log_row(1, 99, 10_000), "Request concurrency: 2\n" + words.replace("3", "2")))
        assert (unreported.unstable, len(unreported.rows)) == ((2,), 1)
        assert "unstable" not in names(swept(log(log_row(1, 99, 10_000), log_row(2, 160, 12_500))))

    def test_stability_stands_in_the_log_alone(self) -> None:
        assert "stability-not-stated" in names(swept(sample("resnet_http.csv")))
        assert "stability-not-stated" not in names(swept(sample("resnet_http.csv"), sample("resnet_http.log")))

    def test_a_latency_limit_cuts_the_sweep(self) -> None:
        over = "Request concurrency: 3\nMeasured latency went over the set limit of 20 msec. \n"
        cut = log(log_row(1, 99, 10_000), log_row(2, 160, 12_500), over)
        assert "latency-limit" in names(swept(cut))
        assert "latency-limit" not in names(swept(cut.replace(over, "")))

    def test_lost_requests(self) -> None:
        text = log(log_row(1, 99, 10_000), log_row(2, 160, 12_500))
        lossy = text.replace("Successful request count: 100", "Successful request count: 97")
        assert "requests-lost" in names(swept(lossy))
        assert "requests-lost" not in names(swept(sample("dyn_http.log")))
        document = json.loads(profile(1, 2))
        for request in document["experiments"][1]["requests"][:5]:
            request["response_timestamps"] = []
        rows = plain(cell(ALONE, "Inferences/Second", 100), "2,190,100,3400,500,1000,4000,1000,0,10000,1,1,1")
        assert "requests-lost" in names(swept(rows, json.dumps(document)))
        assert "requests-lost" not in names(swept(rows))

    def test_a_client_at_its_limit(self) -> None:
        warning = "[WARNING] Perf Analyzer is not able to keep up with the desired load. \n"
        text = log(log_row(1, 99, 10_000), log_row(2, 160, 12_500) + warning)
        assert "client-limited" in names(swept(text))
        assert "client-limited" not in names(swept(text.replace(warning, "")))

    def test_a_network_column_that_is_cut_off(self) -> None:
        clamped = plain(ALONE, cell(TWO, "Network+Server Send/Recv", 0))
        assert "network-cut-off" in names(swept(clamped))
        assert swept(clamped).rows[1].latency_s is None
        assert "network-cut-off" not in names(swept(plain(ALONE, TWO)))

    def test_d_may_be_negative_and_stays_so(self, capsys: Out) -> None:
        Path("s.log").write_text(log(log_row(1, 170, 5_800), log_row(2, 165, 12_000)), encoding="utf-8")
        code, out = said(capsys, "import", "s.log", "--advise")
        assert (code, "service-over-cycle (shown)" in out) == (0, True)
        point = read_record(Path("calibration/s.json"), Calibration).points[0]
        assert point.transport_s is not None
        assert point.transport_s.mean == pytest.approx(-0.2e-3)
        assert "service-over-cycle" not in names(swept(plain(ALONE)))

    def test_a_lone_request_that_waits(self) -> None:
        assert "queue-delay" in names(swept(sample("dyn_http.log")))
        assert "queue-delay" not in names(swept(sample("resnet_http.log")))

    def test_s_under_load(self) -> None:
        assert "service-under-load" in names(swept(sample("yolo_shm.log")))
        assert "service-under-load" not in names(swept(sample("resnet_http.log")))

    def test_a_plateau_with_idle_instances(self) -> None:
        flat = [cell(cell(TWO, "Concurrency", m), "Inferences/Second", 120) for m in (2, 3, 4)]
        assert "idle-plateau" in names(swept(plain(ALONE, *flat)))
        rising = [cell(cell(TWO, "Concurrency", m), "Inferences/Second", 100 + 10 * m) for m in (2, 3)]
        assert "idle-plateau" not in names(swept(plain(ALONE, *rising)))
        assert "idle-plateau" not in names(swept(sample("resnet_http.csv")))

    def test_in_process(self) -> None:
        text = log(log_row(1, 99, 10_000), settings="  Batch size: 1\n  Service Kind: TRITON_C_API\n")
        assert "in-process" in names(swept(text))
        assert "in-process" not in names(swept(text.replace("TRITON_C_API", "TRITON")))

    def test_rounded_times(self) -> None:
        row = "m,1,1,c,1:GPU,8,Yes,{x},1.0,{c},0.1,0.1,{s},0.1"
        assert "rounded" in names(swept(table(row.format(x=990, c=1.0, s=0.5))))
        assert "rounded" not in names(swept(table(row.format(x=99, c=10.0, s=5.0))))


RESNET = """\
M* = 2: keep 2 batches of 8 in flight, 507.0 request/s measured, +49.2% over one
  resnet_http: S = 15.12 ms, D = 7.857 ms for batches of 8, and 6 rows measured, not pre-registered
  one in flight: C = 22.98 ms, S = 15.12 ms, D = 7.857 ms (34.2% of C), k = 8, g = 1 assumed
  promised at M*: at most 529.0 request/s; what compute allows: 529.0
  measured peak: 515.0 request/s at M = 5; the first M near it: 2; bound 5%
  M* against the peak: 1.5% less; bound 5%
  beyond M*: 6 in flight give +0.9%, and each takes 92.95 ms, 3.0 times as long
written: calibration/resnet_http.json, calibration/resnet_http-measured.json
next: b2g predict calibration/resnet_http.json, then b2g validate PREDICTION calibration/resnet_http-measured.json
"""


class TestCommand:
    def test_whole(self, capsys: Out) -> None:
        assert said(capsys, "import", str(SAMPLES / "resnet_http.log"), "--advise") == (0, RESNET)
        # The same again is the same.
        assert said(capsys, "import", str(SAMPLES / "resnet_http.log"), "--advise") == (0, RESNET)

    def test_records(self, capsys: Out) -> None:
        assert said(capsys, "import", str(SAMPLES / "resnet_http.log"), "--payload", "588KiB", "--name", "r")[0] == 0
        calibration = read_record(Path("calibration/r.json"), Calibration)
        measured = read_record(Path("calibration/r-measured.json"), Measurement)
        (point,) = calibration.points
        assert (point.k, point.payload_bytes, point.cycles) == (8, 588 * 1024, 310)
        assert point.service_s is not None
        assert point.cycle_s is not None
        assert point.service_s.cv is None
        assert point.cycle_s.cv == pytest.approx(2256 / 22_981)
        assert calibration.source.startswith("perf_analyzer log resnet_http.log, sha256 ")
        assert "a client of another kind" in calibration.notes[0]
        assert (measured.preregistered, measured.prediction_digest) == (False, None)
        assert [run_.placement for run_ in measured.sessions[0].runs] == ["C3", *["C4"] * 5]
        assert (calibration.model, calibration.transport) == (measured.model, "http")

    def test_predict_and_validate_take_them(self, capsys: Out) -> None:
        said(capsys, "import", str(SAMPLES / "resnet_http.log"))
        said(capsys, "predict", "calibration/resnet_http.json", "--analytic")
        (frozen,) = Path("predictions").glob("*.json")
        code, out = said(capsys, "validate", str(frozen), "calibration/resnet_http-measured.json")
        assert (code, out.splitlines()[0][:40]) == (0, "held: The predicted M* = 2 held: the mea")
        assert "note: not pre-registered" in out

    def test_where_the_closed_form_does_not_apply_no_number_is_given(self, capsys: Out) -> None:
        code, out = said(capsys, "import", str(SAMPLES / "dyn_http.log"), "--advise")
        assert code == 3
        assert out.startswith("no M*: the server merges requests in flight")
        assert "M* = " not in out
        assert read_record(Path("calibration/dyn_http.json"), Calibration).model.dynamic_batching is True
        assert said(capsys, "import", str(SAMPLES / "dyn_http.log"))[0] == 0

    def test_where_there_is_nothing_to_gain_it_says_so(self, capsys: Out) -> None:
        files = [str(SAMPLES / f"yolo_shm.{form}") for form in ("csv", "json")]
        code, out = said(capsys, "import", *files, "--advise")
        assert (code, out.splitlines()[0]) == (
            0,
            "M* = 2, and next to nothing is on the table: one batch of 8 in flight has 97.7% of what compute allows, "
            "228.7 of 234.2 request/s",
        )

    def test_json(self, capsys: Out) -> None:
        code, out = said(capsys, "import", str(SAMPLES / "resnet_http.csv"), "--advise", "--json")
        answer = json.loads(out)
        assert code == 0
        assert set(answer) == {"answer", "batch_size", "calibration", "findings", "measurement", "read"}
        assert (answer["answer"]["m_star"], answer["batch_size"]) == (2, 8)
        assert answer["answer"]["gain"] == pytest.approx(507.024 / 339.878 - 1)
        assert answer["read"] == [{"file": "resnet_http.csv", "kind": "perf_analyzer CSV"}]

    def test_one_row_is_a_calibration_alone(self, here: Path, capsys: Out) -> None:
        Path("s.csv").write_text(plain(ALONE), encoding="utf-8")
        code, out = said(capsys, "import", "s.csv", "--advise")
        assert (code, sorted(path.name for path in Path("calibration").iterdir())) == (0, ["s.json"])
        assert out.startswith(
            "M* = 2: keep 2 batches of 1 in flight, which promises +66.7% at most over one; it was not "
        )

    def test_a_table_of_several_configurations(self, here: Path, capsys: Out) -> None:
        rows = [f"m,1,1,m_config_{n},{n + 1}:GPU,8,Yes,99,12.0,10.0,0.5,1.0,4.0,1.0" for n in (0, 1)]
        Path("t.csv").write_text(table(*rows), encoding="utf-8")
        assert said(capsys, "import", "t.csv", "--config", "m_config_1", "--advise")[1].startswith("M* = 4")
        assert run(["import", "t.csv", "--config", "m_config_1", "--instances", "1"]) == 2
        assert "the file states another number of instances" in capsys.readouterr().err

    def test_another_run_under_the_same_name_is_refused(self, here: Path, capsys: Out) -> None:
        Path("s.csv").write_text(plain(ALONE), encoding="utf-8")
        said(capsys, "import", "s.csv")
        Path("s.csv").write_text(plain(cell(ALONE, "Inferences/Second", 98)), encoding="utf-8")
        assert run(["import", "s.csv"]) == 2
        assert "never overwritten" in capsys.readouterr().err

    def test_defaults_of_a_table_are_known(self) -> None:
        assert recognise(table(header=TABLE)) is Kind.TABLE
        assert recognise(table(header=f"{TABLE},{TIMES}")) is Kind.TABLE

    def test_a_name_that_is_no_text(self, here: Path, capsys: Out) -> None:
        path = Path(os.fsdecode(b"\xff run.csv"))
        path.write_text(plain(ALONE), encoding="utf-8")
        assert said(capsys, "import", str(path))[0] == 0
        assert [made.name for made in Path("calibration").iterdir()] == ["run.json"]
