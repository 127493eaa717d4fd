"""The command line against a server: the negative controls, and a whole run by following what it says."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from cli_bench import MEASURED, Out, complained, said
from fake_bench import SCRIPT, renew

from b2gmodel.cli import run
from b2gmodel.ledger import Ledger
from b2gmodel.live.fake import FakeServer, Fault, FaultKind
from b2gmodel.records import Calibration, Measurement, Verdict, canonical_bytes, digest_of
from b2gmodel.store import read_record


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrument's test of itself takes seconds and has tests of its own."""

    async def passed() -> tuple[()]:
        return ()

    monkeypatch.setattr("b2gmodel.live.sessions.self_test", passed)


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


class TestNegativeControls:
    """The issue's list: each a line of its own and an exit code that says whose fault it is."""

    def test_an_edited_prediction(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        builders.written(here, builders.measurement(builders.prediction(), MEASURED))
        path.write_bytes(path.read_bytes().replace(b'"m_star":3', b'"m_star":4'))
        for command in (["validate", str(path), "measured.json"], ["measure", str(path)]):
            code, seen = complained(capsys, *command)
            assert code == 3
            assert seen.startswith(f"{path}: the prediction was changed after it was frozen: saw ")
            assert seen.endswith("; restore the file as it was frozen")

    def test_a_prediction_that_was_never_frozen(self, capsys: Out, here: Path) -> None:
        Path("mine.json").write_bytes(canonical_bytes(builders.prediction()))
        code, seen = complained(capsys, "measure", "mine.json")
        assert (code, seen.split(": saw")[0]) == (3, "predictions/ledger.jsonl: the prediction is not in the ledger")

    def test_a_measurement_of_another_prediction(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        other = builders.prediction(builders.calibration(name="other"))
        builders.written(here, builders.measurement(other, MEASURED))
        code, seen = complained(capsys, "validate", str(path), "measured.json")
        assert code == 3
        assert seen == (
            f"measured: the measurement was made for another prediction: saw '{digest_of(other)}'; "
            f"allowed: {digest_of(builders.prediction())}; validate it against its own prediction"
        )

    def test_an_edited_measurement(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        file = builders.written(here, builders.measurement(builders.prediction(), MEASURED))
        file.write_bytes(file.read_bytes().replace(b'"throughput_per_s":690', b'"throughput_per_s":990.0'))
        code, seen = complained(capsys, "validate", str(path), "measured.json")
        assert code == 3
        assert seen.startswith("measured.json: the record is not in canonical form")

    def test_a_truncated_calibration(self, capsys: Out, here: Path) -> None:
        file = builders.written(here, builders.calibration())
        file.write_bytes(file.read_bytes()[:-20])
        code, seen = complained(capsys, "predict", "cal.json", "--analytic")
        assert code == 3
        assert seen.startswith("cal.json: the record is damaged or truncated: it is not JSON: saw ")

    def test_a_calibration_without_what_is_needed(self, capsys: Out, here: Path) -> None:
        point = builders.point().model_copy(update={"cycle_s": None, "throughput_per_s": None})
        builders.written(here, builders.calibration(point))
        code, seen = complained(capsys, "predict", "cal.json", "--analytic")
        assert (code, seen.split(": saw")[0]) == (3, "cal: the calibration does not state what the closed form needs")

    def test_a_damaged_ledger(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        Path("predictions/ledger.jsonl").write_bytes(b"{}\n")
        code, seen = complained(capsys, "measure", str(path))
        assert (code, seen.split(": saw")[0]) == (3, "predictions/ledger.jsonl, line 1: the ledger is damaged")

    def test_a_dead_server(self, capsys: Out) -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        code, seen = complained(capsys, "calibrate", "-q", "--url", f"http://127.0.0.1:{port}", "--model", "m")
        assert code == 2
        assert seen.startswith(f"127.0.0.1:{port}: cannot reach the server: saw ")
        assert seen.endswith("; check that the server is up and that this is its HTTP address")

    def test_grpc_without_its_address_is_said_before_the_self_test(
        self, capsys: Out, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("b2gmodel.live.sessions.self_test", None)
        code, seen = complained(
            capsys, "calibrate", "-q", "--url", server.address, "--model", "m", "--transport", "grpc"
        )
        assert (code, seen.split(";")[0]) == (2, "--transport grpc: the server's gRPC address is not known")

    def test_a_wrong_model_name(self, capsys: Out, server: FakeServer) -> None:
        code, seen = complained(capsys, "calibrate", "-q", "--url", server.address, "--model", "resnet")
        assert code == 2
        assert seen == (
            "--model: the server does not serve this model: saw \"resnet (Request for unknown model: 'resnet' is not "
            'found)"; it serves: an odd/../name, m, open, unbatched'
        )

    def test_a_model_without_batching(self, capsys: Out, server: FakeServer) -> None:
        code, seen = complained(capsys, "calibrate", "-q", "--url", server.address, "--model", "unbatched")
        assert code == 2
        assert seen == (
            "-k: the model does not batch (its max_batch_size is 0): saw 8; allowed: 1; give unbatched a "
            "max_batch_size in its configuration, or calibrate it with -k 1"
        )

    def test_a_server_that_fails(self, capsys: Out, server: FakeServer) -> None:
        server.install(replace(SCRIPT, faults=(Fault(FaultKind.STATUS, probability=1.0),)))
        code, seen = complained(capsys, "calibrate", "-q", "--url", server.address, "--model", "m")
        assert (code, seen.split(": saw")[0]) == (3, "m: the server refused the batch")

    def test_they_are_all_told_apart(self) -> None:
        """The tests above hold nine different openings; this one holds that none is another's beginning."""
        problems = [
            "the prediction was changed after it was frozen",
            "the prediction is not in the ledger",
            "the measurement was made for another prediction",
            "the record is not in canonical form",
            "the record is damaged or truncated",
            "the calibration does not state",
            "the ledger is damaged",
            "cannot reach the server",
            "the server does not serve this model",
            "the model does not batch",
            "the server refused the batch",
        ]
        assert not [(a, b) for a in problems for b in problems if a is not b and a.startswith(b)]


class TestCalibrate:
    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (["-k", "9"], "-k: the batch is larger than the model takes: saw 9; allowed: 1 to 8"),
            (["-k", "0"], "-k: not a list of batch sizes or flights: saw '0'"),
            (["-k", ""], "-k: not a list of batch sizes or flights: saw ''"),
            (["-k", "8,"], "-k: not a list of batch sizes or flights: saw '8,'"),
            (["-k", "-8"], "-k: not a list of batch sizes or flights: saw '-8'"),
            (["-k", "1.5"], "-k: not a list of batch sizes or flights: saw '1.5'"),
            (["--shape", "x"], "--shape: not a shape: saw 'x'"),
            (["--shape", "x:"], "--shape: not a shape: saw 'x:'"),
            (["--shape", "x:4,0"], "--shape: not a shape: saw 'x:4,0'"),
            (["--shape", "x:4,-1"], "--shape: not a shape: saw 'x:4,-1'"),
            (["--shape", ":4,3"], "--shape: not a shape: saw ':4,3'"),
            (["--shape", "x:4,3", "--shape", "x:4,3"], "--shape: not a shape: saw 'x:4,3'"),
            (["--shape", "x:4,4"], "--shape: the shape does not fit the model's input: saw 'x:4,4'; allowed: x:4,3"),
            (["--shape", "y:4,3"], "--shape: the model has no such input: saw 'y'; allowed: x"),
            (["--budget", "30"], "--budget: not a time: saw '30'"),
            (["--budget", "0s"], "--budget: a time must be finite and positive: saw '0s'"),
            (["--precision", "nan"], "--precision: not a precision: saw nan; allowed: above 0 and below 1"),
            (["--precision", "0"], "--precision: not a precision: saw 0.0"),
            (["--precision", "1"], "--precision: not a precision: saw 1.0"),
            (["--precision", "two"], "Invalid value for '--precision'"),
            (["--starts", "0"], "Invalid value for '--starts'"),
            (["--starts", "two"], "Invalid value for '--starts'"),
            (["--name", "a b"], "--name: this cannot be a name: saw 'a b'"),
            (["--compute", "real"], "--compute: not a kind of compute: saw 'real'"),
            (["--model", "m"], "--model: a model is named twice"),
            (["--transport", "carrier-pigeon"], "--transport: no such transport: saw 'carrier-pigeon'"),
        ],
    )
    def test_mistyped(self, capsys: Out, server: FakeServer, options: list[str], line: str) -> None:
        if options[0] == "--compute":
            code, seen = complained(capsys, "calibrate", "-q", *options)
        else:
            code, seen = complained(capsys, "calibrate", "-q", "--url", server.address, "--model", "m", *options)
        assert code == 2
        assert seen.startswith(line)
        assert not Path("calibration").exists()

    @pytest.mark.parametrize(
        ("starts", "note"),
        [
            (
                1,
                "one start of the server: what differs between its starts is not in the intervals; restart it "
                "yourself, and calibrate once each time",
            ),
            (2, "calibrated over 2 sessions of a server that was not started for them"),
        ],
    )
    def test_what_the_intervals_hold_is_said(
        self, capsys: Out, here: Path, server: FakeServer, starts: int, note: str
    ) -> None:
        options = ("--model", "m", "-k", "2", "--precision", "0.5", "--name", "mine", "--starts", str(starts))
        code, out = said(capsys, "calibrate", "-q", "--url", server.address, *options)
        lines = out.splitlines()
        assert (code, lines[0], len(lines)) == (0, "calibrated m (emulated compute) over http", 7)
        assert lines[3:] == [
            "note: no transport law was measured, as that takes a null model (--null-model): predicted heights are "
            "upper bounds",
            f"note: {note}",
            "written: calibration/mine.json",
            "next: b2g predict calibration/mine.json",
        ]
        assert len(read_record(here / "calibration" / "mine.json", Calibration).session_ids) == starts

    @pytest.mark.parametrize("url", ["", "localhost", "localhost:x", "localhost:0", "localhost:70000", "https://a:1"])
    def test_an_address_that_is_none(self, capsys: Out, url: str) -> None:
        code, seen = complained(capsys, "calibrate", "-q", "--url", url, "--model", "m")
        assert code == 2
        assert seen == (
            f"--url: not the address of a server: saw {url!r}; allowed: http://HOST:PORT, with a port from 1 to 65535; "
            "Triton's HTTP endpoint is port 8000 by default"
        )

    @pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
    def test_a_host_that_is_none(self, capsys: Out, host: str) -> None:
        code, seen = complained(capsys, "calibrate", "-q", "--url", f"{host}:8000", "--model", "m")
        assert (code, seen.split(": saw")[0]) == (2, f"{host}:8000: cannot reach the server")

    def test_an_address_without_a_model(self, capsys: Out, server: FakeServer) -> None:
        code, seen = complained(capsys, "calibrate", "--url", server.address)
        assert (code, seen.split(";")[0]) == (2, "--model: a model is needed with --url")

    def test_open_shapes_list_what_is_missing(self, capsys: Out, server: FakeServer) -> None:
        code, seen = complained(capsys, "calibrate", "-q", "--url", server.address, "--model", "open")
        assert (code, seen) == (
            2,
            "open: the model has inputs of dynamic shape: saw '--shape x:4,?, --shape mask:?'; allowed: positive "
            "numbers in place of each ?; add these options, without the batch dimension",
        )


class TestEndToEnd:
    """Calibrate, predict, measure, validate against the fake: each command's last line is the next command."""

    def test_by_following_what_each_command_says(self, capsys: Out, server: FakeServer) -> None:
        options = ("--budget", "5s", "--precision", "0.5", "--name", "cal", "--null-model", "none", "--json")
        code, out = said(capsys, "calibrate", "-q", "--url", server.address, "--model", "m", *options)
        (written,) = json.loads(out)["calibrations"]
        assert (code, written["file"]) == (0, "calibration/cal.json")
        calibration = read_record(Path(written["file"]), Calibration)
        assert written["calibration"] == calibration.model_dump(mode="json")

        plan = ("--flights", "1,2", "--sessions", "2", "--seconds", "50ms")
        code, out = said(capsys, "predict", written["file"], "--analytic", *plan)
        assert code == 0
        following = out.splitlines()[-1].removeprefix("next: b2g ").split()
        assert following[0] == "measure"

        code, out = said(capsys, *following, "-q", "--name", "meas")
        lines = out.splitlines()
        assert code == 0
        assert lines[0].startswith("measured: peak ")
        assert lines[1] == "written: predictions/meas.json"
        measurement = read_record(Path("predictions/meas.json"), Measurement)

        code = run(lines[-1].removeprefix("next: b2g ").split())
        verdict = capsys.readouterr().out.splitlines()[0].split(":")[0]
        assert {"held": 0, "refuted": 1, "inconclusive": 3}[verdict] == code
        (file,) = Path("predictions").glob("meas-verdict-*.json")
        assert read_record(file, Verdict).measurement_digest == digest_of(measurement)
        assert [entry.event for entry in Ledger(Path("predictions")).entries()] == [
            "freeze",
            "begin",
            "measure",
            "outcome",
        ]

    def test_progress_goes_to_stderr_alone(self, capsys: Out, server: FakeServer) -> None:
        options = ("--budget", "5s", "--precision", "0.5", "--null-model", "none")
        assert run(["calibrate", "--url", server.address, "--model", "m", *options]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("calibrated m")
        assert "m k=8" in captured.err
        assert "%" in captured.err
