"""The command line without a server: whole outputs, exit codes, one line for whatever is mistyped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import builders
import pytest
from cli_bench import MEASURED, Out, complained, said

from b2gmodel.cli import run
from b2gmodel.ledger import Ledger
from b2gmodel.records import Prediction, Verdict, digest_of
from b2gmodel.store import read_record


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestMstar:
    def test_whole(self, capsys: Out) -> None:
        assert said(capsys, "mstar", "--service", "27.6ms", "--transport", "61.3ms") == (
            0,
            "M* = 4\n"
            "  a batch holds its instance for 27.6 ms of a 88.9 ms cycle, so it takes 3.221 batches in flight, in "
            "whole batches 4, to keep 1 instance busy.\n"
            "  cycle 88.9 ms, transport share 69.0%, g = 1\n"
            "  batches a second: 11.25 with one in flight, at most 36.23 at M* (an upper bound: transports that share "
            "a processor or a link overlap less)\n"
            "next: b2g calibrate measures S and D on your server\n",
        )

    def test_without_transport(self, capsys: Out) -> None:
        code, out = said(capsys, "mstar", "--service", "10ms", "--transport", "0ms", "--instances", "2")
        assert (code, out.splitlines()[0]) == (0, "M* = 2")

    def test_json(self, capsys: Out) -> None:
        code, out = said(capsys, "mstar", "--service", "27.6ms", "--transport", "61.3ms", "--json")
        answer = json.loads(out)
        assert (code, answer["m_star"], answer["instances"]) == (0, 4, 1)
        assert set(answer) == {
            "cycle_s",
            "gain",
            "instances",
            "m_star",
            "saturation_rate_per_s",
            "service_s",
            "single_flight_rate_per_s",
            "transport_s",
            "transport_share",
            "why",
        }

    @pytest.mark.parametrize(
        ("service", "transport", "instances", "line"),
        [
            ("27.6", "1ms", "1", "--service: not a time: saw '27.6'"),
            ("27,6ms", "1ms", "1", "--service: not a time: saw '27,6ms'"),
            ("", "1ms", "1", "--service: not a time: saw ''"),
            ("0ms", "1ms", "1", "--service: a time must be finite and positive: saw '0ms'"),
            ("-1ms", "1ms", "1", "--service: a time must be finite and positive: saw '-1ms'"),
            ("nanms", "1ms", "1", "--service: a time must be finite and positive: saw 'nanms'"),
            ("infs", "1ms", "1", "--service: a time must be finite and positive: saw 'infs'"),
            ("1ms", "-1ms", "1", "--transport: a time must be finite and positive: saw '-1ms'"),
            ("1ms", "1parsec", "1", "--transport: not a time: saw '1parsec'"),
            ("1ms", "1ms", "0", "instances: not a count: saw 0; allowed: a whole number, at least 1"),
            ("1ms", "1ms", "-2", "instances: not a count: saw -2"),
            ("1ms", "1ms", "two", "Invalid value for '--instances':"),
            ("1ms", "1ms", "1.5", "Invalid value for '--instances':"),
            ("1ms", "1ms", "nan", "Invalid value for '--instances':"),
        ],
    )
    def test_mistyped(self, capsys: Out, service: str, transport: str, instances: str, line: str) -> None:
        arguments = ("--service", service, "--transport", transport, "--instances", instances)
        code, seen = complained(capsys, "mstar", *arguments)
        assert code == 2
        assert seen.startswith(line)


class TestPredict:
    def test_whole(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration(builders.point(spread=0.0)))
        code, out = said(capsys, "predict", "cal.json", "--flights", "1,2,3,4", "--up-to", "4", "--analytic")
        (path,) = Path("predictions").glob("*.json")
        prediction = read_record(path, Prediction)
        assert (code, out.splitlines()) == (
            0,
            [
                "M* = 3: keep 3 batches in flight, and expect at most 800.0 [800.0, 800.0] request/s (closed-form)",
                "  over the calibration's own uncertainty: M* = 3: 100%",
                "  the instances can compute 800 request/s; what the transport can carry is not known: no transport "
                "law was measured",
                "  predictor               kind  M*  95 % at M  loss < 2 % at M  peak/s",
                "  closed-form      upper bound   3          3                3   800.0",
                "  bounds                bounds   3          3                3   800.0",
                "  mva              upper bound   3          4                4   761.6",
                "  twice-instances        rival   2          2                2   640.0",
                "  M         closed-form/s              bounds/s                 mva/s  mean cycle",
                "  1  320.0 [320.0, 320.0]  320.0 [320.0, 320.0]  320.0 [320.0, 320.0]       25 ms",
                "  2  640.0 [640.0, 640.0]  640.0 [400.0, 640.0]  551.7 [551.7, 551.7]       25 ms",
                "  3  800.0 [800.0, 800.0]  800.0 [436.4, 800.0]  692.5 [692.5, 692.5]       30 ms",
                "  4  800.0 [800.0, 800.0]  800.0 [457.1, 800.0]  761.6 [761.6, 761.6]       40 ms",
                "note: no transport law was measured, so transport is taken for a pure delay, and heights are upper "
                "bounds as far as transport goes: calibrate with --null-model",
                "note: the intervals are those of one start of the server: what differs between starts is not in them",
                "note: the compute was emulated",
                f"frozen: {path}",
                f"next: b2g measure {path}",
            ],
        )
        assert path.name == f"cal-k8-{digest_of(prediction)}.json"
        assert prediction.plan.flights == (1, 2, 3, 4)

    def test_the_same_again_is_the_same_file(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration())
        first, again = (said(capsys, "predict", "cal.json", "--analytic") for _ in range(2))
        assert first == again
        assert len(Ledger(Path("predictions")).entries()) == 1

    def test_json(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration())
        code, out = said(capsys, "predict", "cal.json", "--json", "--name", "mine", "--analytic")
        answer = json.loads(out)
        assert (code, sorted(answer)) == (0, ["digest", "file", "prediction", "signature"])
        assert Path(answer["file"]).name == f"mine-{answer['digest']}.json"
        assert answer["prediction"] == read_record(Path(answer["file"]), Prediction).model_dump(mode="json")

    def test_without_a_server_the_next_step_is_a_measurement_at_hand(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration().model_copy(update={"server": None}))
        _, out = said(capsys, "predict", "cal.json", "--analytic")
        assert out.splitlines()[-1].endswith("MEASUREMENT")

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (["-k", "4"], "-k: the calibration has no point for this batch size: saw 4; allowed: 8"),
            (["-k", "x"], "Invalid value for '-k'"),
            (["--flights", ""], "--flights: not a list of batch sizes or flights: saw ''"),
            (["--flights", "1,,2"], "--flights: not a list of batch sizes or flights: saw '1,,2'"),
            (["--flights", "0,1"], "--flights: not a list of batch sizes or flights: saw '0,1'"),
            (["--flights", "2,2"], "--flights: not a list of batch sizes or flights: saw '2,2'"),
            (["--flights", "1,99999999999999999999"], "--flights: not a list of batch sizes or flights"),
            (["--flights", ",".join(map(str, range(1, 300)))], "--flights: not a list of batch sizes or flights"),
            (["--flights", "nan"], "--flights: not a list of batch sizes or flights: saw 'nan'"),
            (["--flights", "3"], "--flights: the plan measures M* alone"),
            (["--sessions", "0"], "Invalid value for '--sessions'"),
            (["--seconds", "0s"], "--seconds: a time must be finite and positive: saw '0s'"),
            (["--seconds", "2"], "--seconds: not a time: saw '2'"),
            (["--seed", "-1"], "Invalid value for '--seed'"),
            (["--seed", "9007199254740992"], "Invalid value for '--seed'"),
            (["--name", "../x"], "--name: this cannot be a name: saw '../x'"),
            (["--name", ""], "--name: this cannot be a name: saw ''"),
            (["--predictions", "cal.json"], "cal.json/cal-k8-"),
            (["--flihgts", "1"], "No such option: --flihgts"),
            (["more"], "more: cannot read the file"),
            (["cal.json", "--name", "x"], "--name: one name for several predictions: saw 'x'"),
            (["--up-to", "0"], "Invalid value for '--up-to'"),
            (["--draws", "1"], "Invalid value for '--draws'"),
            (["--what-if", "payload"], "--what-if: not a change: saw 'payload'"),
            (["--what-if", "transport=shm"], "--what-if: no calibration over this transport is given: saw 'shm'"),
        ],
    )
    def test_mistyped(self, capsys: Out, here: Path, options: list[str], line: str) -> None:
        builders.written(here, builders.calibration())
        code, seen = complained(capsys, "predict", "cal.json", "--analytic", *options)
        assert code == 2
        assert seen.startswith(line)
        assert not Path("predictions").exists()

    @pytest.mark.parametrize("file", ["missing.json", ".", "", "x" * 300])
    def test_a_file_that_is_not_there(self, capsys: Out, file: str) -> None:
        code, seen = complained(capsys, "predict", file)
        assert (code, "cannot read the file" in seen) == (2, True)

    def test_a_record_of_another_kind(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.measurement(builders.prediction(), MEASURED))
        code, seen = complained(capsys, "predict", "measured.json")
        assert (code, seen) == (
            2,
            "measured.json: this file is no such record: saw 'b2g.measurement'; allowed: b2g.calibration; "
            "check the path",
        )

    def test_several_calibrations_at_once(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration(name="one"))
        builders.written(here, builders.calibration(name="two"))
        code, out = said(capsys, "predict", "one.json", "two.json", "--analytic", "--json")
        assert code == 0
        assert [each["prediction"]["name"] for each in json.loads(out)["predictions"]] == ["one-k8", "two-k8"]

    def test_the_simulation_is_one_of_the_predictors(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration())
        code, out = said(
            capsys, "predict", "cal.json", "--up-to", "3", "--flights", "1,3", "--draws", "20", "-q", "--json"
        )
        predictors = json.loads(out)["prediction"]["predictors"]
        assert code == 0
        assert [each["name"] for each in predictors] == [
            "closed-form", "bounds", "mva", "simulation", "twice-instances"
        ]  # fmt: skip
        # Without spread the simulated cycle is the deterministic one: min(M / C, 1 / S).
        simulated = [each["throughput_per_s"] for each in predictors[3]["curve"]]
        assert simulated == pytest.approx([320.0, 640.0, 800.0], rel=0.01)

    def test_a_what_if_says_what_it_assumes_and_is_not_frozen(self, capsys: Out, here: Path) -> None:
        builders.written(here, builders.calibration())
        code, out = said(capsys, "predict", "cal.json", "--analytic", "--what-if", "service=0.5x,instances=2")
        assert code == 0
        assert out.startswith("M* = 8: keep 8 batches in flight, and expect at most 3200.0")
        assert "what if service=0.5x, instances=2: an extrapolation, not a measurement of this system" in out
        assert "not frozen: a what-if cannot be measured on this system" in out
        assert not Path("predictions").exists()


def validated(capsys: Out, here: Path, curve: dict[int, list[float]]) -> tuple[int, list[str]]:
    """Exit code and lines of a validation of the usual prediction against a measured curve."""
    path = builders.frozen(here / "predictions")
    builders.written(here, builders.measurement(builders.prediction(), curve, baseline=250.0))
    code, out = said(capsys, "validate", str(path), "measured.json")
    return code, out.splitlines()


class TestValidate:
    def test_whole(self, capsys: Out, here: Path) -> None:
        code, lines = validated(capsys, here, MEASURED)
        assert code == 0
        assert lines == [
            "held: The predicted M* = 3 held: the measured peak, 695 request/s, is at M = 3. The height: closed-form "
            "promised 800 and 695 were measured at M*, 15.1% too high; no claim was made of it.",
            "  held          M* is among the best M (closed-form): M* = 3, best M = 3; regret 0.0% [0.0%, 0.0%]; "
            "bound: regret <= 5.0%",
            "  passed        digests chain: it names this prediction; bound: the digest of what was frozen",
            "  passed        one clock: CLOCK_MONOTONIC, one boot, 2 session(s) in order; bound: one boot, sessions "
            "one after the other",
            "  passed        no requests lost: none failed; bound: at most 0.0% of a run's batches",
            "  passed        batches are full: all hold k; bound: at least 95% hold k",
            "  passed        the server's counts agree: none off; bound: executions within 1.0% of ours in each run",
            "  passed        sessions are new: 2 session(s), 1 in the calibration; bound: none of the calibration's, "
            "none twice",
            "  passed        steady state: no drift shown; the largest is +0.0%; bound: drift of X within ±10% of a "
            "run",
            "  M  measured/s  low 90 %  high 90 %     closed-form             mva  twice-instances   usl (fitted)",
            "  1       321.0     314.7      327.3   320.0 (-0.3%)   320.0 (-0.3%)    320.0 (-0.3%)  332.9 (+3.7%)",
            "  2       602.0     589.4      614.6   640.0 (+6.3%)   551.7 (-8.4%)    640.0 (+6.3%)  578.5 (-3.9%)",
            "  3       695.0     663.4      726.6  800.0 (+15.1%)   692.5 (-0.4%)    640.0 (-7.9%)  687.3 (-1.1%)",
            "  4       685.0     653.4      716.6  800.0 (+16.8%)  761.6 (+11.2%)    640.0 (-6.6%)  698.6 (+2.0%)",
            "  predictor         MAPE  90 % interval covers   CRPS  skill on twice-instances  on best constant",
            "  closed-form      12.7%         0/3 [0%, 63%]  12.6%                     -0.85             -1.48",
            "  bounds               -       3/3 [37%, 100%]      -                         -                 -",
            "  mva               6.6%         1/3 [2%, 86%]   6.5%                     +0.04             -0.28",
            "  twice-instances   6.9%         0/3 [0%, 63%]   6.8%                     +0.00             -0.34",
            "  usl (fitted)      2.3%                     -      -                         -                 -",
            "  best constant     5.1%                     -   5.1%                     +0.26             +0.00",
            "note: scores are over M > 1, in shares of the measured X(M); skill is in CRPS",
            "note: best constant and usl (fitted) saw the answer: fitted to this very measurement",
            "without batching (C1): 250.0 request/s",
            "next: set M = 3 in your proxy",
        ]

    def test_refuted(self, capsys: Out, here: Path) -> None:
        code, lines = validated(capsys, here, {1: [320.0, 321.0], 3: [500.0, 501.0], 4: [700.0, 701.0]})
        assert code == 1
        assert lines[0].startswith(
            "refuted: The predicted M* = 3 is refuted: the measured peak, 700.5 request/s, is at M = 4"
        )
        assert lines[-1] == "next: set M = 4, where the measured peak is, and look for what closed-form leaves out"

    def test_inconclusive(self, capsys: Out, here: Path) -> None:
        code, lines = validated(capsys, here, {1: [320.0], 3: [700.0]})
        assert code == 3
        assert lines[0].startswith("inconclusive: The predicted M* = 3 is neither held nor refuted")
        again = "b2g predict CALIBRATION -k 8 --flights 1,2,3,4 --sessions 8 --seconds 1s"
        why = "1 are too few to say how many"
        assert lines[-1] == f"next: measure more sessions ({why}): {again}, then b2g measure what it froze"

    def test_inconclusive_with_the_calibration_at_hand(self, capsys: Out, here: Path) -> None:
        name = builders.prediction().calibration_name
        Path("calibration").mkdir()
        Path(f"calibration/{name}.json").touch()
        _, lines = validated(capsys, here, {1: [320.0], 3: [700.0]})
        assert f" b2g predict calibration/{name}.json -k 8 --flights" in lines[-1]

    def test_json_and_the_verdicts_file(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        builders.written(here, builders.measurement(builders.prediction(), MEASURED))
        code, out = said(capsys, "validate", str(path), "measured.json", "--json")
        answer = json.loads(out)
        assert (code, sorted(answer)) == (0, ["file", "signer", "verdict"])
        assert read_record(Path("predictions") / answer["file"], Verdict).model_dump(mode="json") == answer["verdict"]
        assert [entry.event for entry in Ledger(Path("predictions")).entries()] == ["freeze", "outcome"]

    def test_twice_is_once(self, capsys: Out, here: Path) -> None:
        assert validated(capsys, here, MEASURED) == validated(capsys, here, MEASURED)
        assert [entry.event for entry in Ledger(Path("predictions")).entries()] == ["freeze", "outcome"]

    def test_by_digits_and_with_the_last_measurement_that_the_ledger_knows(self, capsys: Out, here: Path) -> None:
        builders.frozen(here / "predictions")
        prediction, ledger = builders.prediction(), Ledger(here / "predictions")
        digits = digest_of(prediction)[:8]
        code, seen = complained(capsys, "validate", digits)
        assert (code, seen) == (
            2,
            f"{digits}: this prediction has not been measured; run b2g measure {digits}, or name a measurement",
        )
        for name, curve in (("first", {1: [1.0], 3: [2.0]}), ("last", MEASURED)):
            path = builders.written(ledger.folder, builders.measurement(prediction, curve, name=name))
            ledger.note("measure", digest_of(prediction), path.name)
        code, out = said(capsys, "validate", digits)
        assert (code, out.splitlines()[0].split(":")[0]) == (0, "held")

    def test_a_figure(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        builders.written(here, builders.measurement(builders.prediction(), MEASURED))
        _, out = said(capsys, "validate", str(path), "measured.json", "--figure", "x.svg")
        assert out.splitlines()[-2] == "figure: x.svg"
        assert Path("x.svg").read_bytes().startswith(b"<?xml")

    def test_published_figures_are_not_preregistered_and_say_so(self, capsys: Out, here: Path) -> None:
        path = builders.frozen(here / "predictions")
        curve = {1: [320.0], 3: [700.0]}
        builders.written(
            here, builders.measurement(builders.prediction(), curve, preregistered=False, prediction_digest=None)
        )
        code, out = said(capsys, "validate", str(path), "measured.json")
        assert code == 0
        assert "note: not pre-registered: these figures were measured before the prediction was made" in out


class TestEntry:
    def test_no_arguments_is_help(self, capsys: Out) -> None:
        code, out = said(capsys)
        assert (code, "Usage:" in out, "calibrate" in out) == (0, True, True)

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["calibrat"], "No such command 'calibrat'."),
            (["mstar"], "Missing option '--service'."),
            (["predict"], "Missing argument '"),
            (["validate"], "PREDICTION: which prediction?; name one, or ask for --all"),
            (["validate", "nothing"], "PREDICTION: no such prediction: saw 'nothing'; allowed: a file, or at least 8"),
            (["measure", "00000000"], "PREDICTION: no such prediction: saw '00000000'"),
            (["measure", "x" * 300], "PREDICTION: no such prediction"),
            (["--nope"], "No such option: --nope"),
        ],
    )
    def test_mistyped(self, capsys: Out, arguments: list[str], line: str) -> None:
        code, seen = complained(capsys, *arguments)
        assert code == 2
        assert seen.startswith(line)

    def test_a_failure_of_ours_is_never_a_favourable_answer(self, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("b2gmodel.closed_form.mstar", lambda *_: 1 // 0)
        monkeypatch.delenv("B2G_DEBUG", raising=False)
        code = run(["mstar", "--service", "1ms", "--transport", "1ms"])
        captured = capsys.readouterr()
        assert (code, captured.out) == (4, "")
        assert captured.err == (
            "b2g: internal failure: ZeroDivisionError: integer division or modulo by zero; "
            "set B2G_DEBUG=1 for the traceback\n"
        )

    def test_an_interruption(self, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("b2gmodel.closed_form.mstar", interrupt)
        assert run(["mstar", "--service", "1ms", "--transport", "1ms"]) == 130
        assert capsys.readouterr().err == "b2g: interrupted\n"

    def test_as_a_program(self) -> None:
        """The installed entry: stdout, stderr and exit code of a real process."""
        program = [sys.executable, "-m", "b2gmodel"]
        good = subprocess.run(
            [*program, "mstar", "--service", "1ms", "--transport", "1ms"], capture_output=True, text=True, check=False
        )
        assert (good.returncode, good.stdout.splitlines()[0], good.stderr) == (0, "M* = 2", "")
        bad = subprocess.run(
            [*program, "mstar", "--service", "1", "--transport", "1ms"], capture_output=True, text=True, check=False
        )
        assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)

    def test_a_reader_that_has_left_is_no_failure(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "b2gmodel", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            errors = process.stderr.read()
        assert (process.returncode, errors) == (141, b"")
