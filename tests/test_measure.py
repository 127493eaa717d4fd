"""Measurements against the fake: the plan that was frozen, all of it, and nothing that was not."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_bench import MODEL, SCRIPT, endpoint_of, renew, run, target_of

from b2gmodel.errors import B2GError, EvidenceError, ServerError, UsageError
from b2gmodel.judge import judge
from b2gmodel.ledger import Ledger
from b2gmodel.live.calibrate import model_info
from b2gmodel.live.fake import FakeScript, FakeServer, FakeTensor, Fault, FaultKind
from b2gmodel.live.infer import InferMessage
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.sessions import measure_frozen
from b2gmodel.measured import measured_curve
from b2gmodel.prediction import predict
from b2gmodel.records import Calibration, Measurement, ModelInfo, Plan, Prediction, digest_of
from b2gmodel.store import read_record, sha256_of_file


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "predictions")


def described(server: FakeServer) -> tuple[ModelSpec, ModelInfo]:
    async def main() -> ModelSpec:
        control = ControlPlane(endpoint_of(server).host, endpoint_of(server).port)
        try:
            return await control.model("m", {})
        finally:
            control.close()

    spec = run(main())
    return spec, model_info(spec, endpoint_of(server))


def calibration(server: FakeServer) -> Calibration:
    """Of the fake's model, with M* = 3."""
    return builders.calibration(model=described(server)[1])


def frozen(
    server: FakeServer, ledger: Ledger, *, flights: Sequence[int] = (1, 2, 3), sessions: int = 2, seconds: float = 0.05
) -> tuple[Prediction, str]:
    plan = Plan(
        flights=tuple(flights), sessions=sessions, seconds_per_run=seconds, baseline_concurrency=4, order_seed=3
    )
    prediction = predict(calibration(server), k=None, plan=plan, software=builders.SOFTWARE)
    return ledger.load_frozen(ledger.freeze(prediction))


def measured(
    server: FakeServer,
    ledger: Ledger,
    of: tuple[Prediction, str],
    *,
    flights: tuple[int, ...] | None = None,
    name: str | None = "meas",
) -> tuple[Path, Measurement]:
    return measure_frozen(ledger, *of, target_of(server), flights=flights, name=name, progress=lambda *_: None)


class TestPlan:
    def test_all_of_it_is_run_in_each_session(self, server: FakeServer, ledger: Ledger) -> None:
        before = server.log()
        prediction, digest = frozen(server, ledger)
        path, measurement = measured(server, ledger, (prediction, digest))
        orders = [
            [(run.placement, run.flights) for run in sorted(session.runs, key=lambda run: run.order or 0)]
            for session in measurement.sessions
        ]
        assert len(orders) == 2
        for order in orders:
            assert sorted(order) == [("C1", 4), ("C3", 1), ("C4", 2), ("C4", 3)]
        assert (measurement.prediction_digest, measurement.preregistered) == (digest, True)
        assert measurement.model == prediction.model
        assert (measurement.k, measurement.payload_bytes) == (8, 48)
        assert read_record(path, Measurement) == measurement
        # Every batch that the server saw carries the digest of what was frozen before it.
        log = server.log(since=before[-1].number if before else 0)
        assert {(entry.request_id or "").split(".")[0] for entry in log} == {digest}
        assert {entry.rows for entry in log} <= {1, 8}

    def test_the_order_is_the_plans_own(self, server: FakeServer, ledger: Ledger) -> None:
        """Drawn from the frozen seed: the same again, and not the sorted one in every session."""
        of = frozen(server, ledger, sessions=3, seconds=0.001)

        def orders(name: str) -> list[list[int]]:
            _, measurement = measured(server, ledger, of, name=name)
            return [[run.flights for run in session.runs] for session in measurement.sessions]

        first = orders("first")
        assert orders("second") == first
        assert any(order != sorted(order) for order in first)

    def test_a_run_is_what_its_flights_say(self, server: FakeServer, ledger: Ledger) -> None:
        path, measurement = measured(server, ledger, frozen(server, ledger, sessions=1))
        assert measurement.raw is not None
        raw = path.parent / measurement.raw.file
        assert sha256_of_file(raw) == measurement.raw.sha256
        columns = {name: np.array(values) for name, values in pq.read_table(raw).to_pydict().items()}
        (session,) = measurement.sessions
        for each in session.runs:
            of_run = columns["order"] == each.order
            counted = of_run & columns["counted"]
            assert each.batches == counted.sum()
            assert each.requests == columns["size"][counted].sum()
            assert each.server_executions == of_run.sum()
            assert (each.failed, each.full_batches) == (0, counted.sum())
            assert (columns["size"][of_run] == (1 if each.placement == "C1" else 8)).all()
            # The window opens with the last delivery that does not count.
            opened_ns = columns["delivered_ns"][of_run & ~counted].reshape(-1)
            opened_ns = opened_ns[opened_ns < columns["delivered_ns"][counted].min()].max()
            window_s = (columns["delivered_ns"][counted].max() - opened_ns) / 1e9
            assert each.duration_s == pytest.approx(window_s)
            assert each.throughput_per_s == pytest.approx(columns["size"][counted].sum() / window_s)
            assert each.service_s is not None
            assert each.service_s >= 0.65e-3  # what the fake holds its instance for, at least

    def test_never_more_flights_than_the_placement_has(self, server: FakeServer, ledger: Ledger) -> None:
        path, measurement = measured(server, ledger, frozen(server, ledger, sessions=1))
        assert measurement.raw is not None
        rows = pq.read_table(path.parent / measurement.raw.file).to_pylist()
        for order in {row["order"] for row in rows}:
            of_run = [row for row in rows if row["order"] == order]
            events = [(row["sealed_ns"], 1) for row in of_run] + [(row["delivered_ns"], -1) for row in of_run]
            # A flight is launched by the landing of another, whose delivery is stamped a moment later.
            most = np.cumsum([step for _, step in sorted(events)]).max()
            assert of_run[0]["flights"] <= most <= 2 * of_run[0]["flights"]

    def test_it_is_entered_and_can_be_judged(self, server: FakeServer, ledger: Ledger) -> None:
        prediction, digest = frozen(server, ledger)
        path, measurement = measured(server, ledger, (prediction, digest))
        assert [(entry.event, entry.digest, entry.file) for entry in ledger.entries()][1:] == [
            ("begin", digest, path.name),
            ("measure", digest, path.name),
        ]
        verdict = judge(prediction, measurement)
        assert verdict.measurement_digest == digest_of(measurement)
        assert verdict.baseline_per_s is not None

    def test_other_flights_are_a_deviation_that_is_stated(self, server: FakeServer, ledger: Ledger) -> None:
        of = frozen(server, ledger, sessions=1)
        _, measurement = measured(server, ledger, of, flights=(2, 3))
        assert [point.flights for point in measured_curve(measurement)] == [2, 3]
        assert measurement.notes == ("flights [2, 3] were run in place of the frozen plan's [1, 2, 3]",)
        assert measurement.prediction_digest == of[1]
        assert judge(of[0], measurement).preregistered

    @pytest.mark.parametrize("k", [1, 3, 5])
    def test_batches_that_do_not_divide_the_callers(self, server: FakeServer, ledger: Ledger, k: int) -> None:
        """No caller is ever left waiting for partners: the closed loop of each run comes to its end."""
        of_k = builders.calibration(builders.point(k), model=described(server)[1])
        plan = Plan(flights=(1, 3), sessions=1, seconds_per_run=0.01, baseline_concurrency=8, order_seed=1)
        path = ledger.freeze(predict(of_k, k=None, plan=plan, software=builders.SOFTWARE))
        _, measurement = measured(server, ledger, ledger.load_frozen(path))
        assert [point.flights for point in measured_curve(measurement)] == [1, 3]


class TestRefusals:
    def refused(self, server: FakeServer, ledger: Ledger, **options: Any) -> B2GError:
        of = options.pop("of", None) or frozen(server, ledger, sessions=1)
        events = ["freeze", "begin"] if options.pop("begun", False) else ["freeze"]
        with pytest.raises(B2GError) as seen:
            measured(server, ledger, of, **options)
        # Nothing is left that looks like a measurement.
        assert [path.name for path in ledger.folder.iterdir() if path.name.startswith("meas")] == []
        assert [entry.event for entry in ledger.entries()] == events
        return seen.value

    @pytest.mark.parametrize(
        ("change", "aspect"),
        [
            ({"instances": 2}, "instances"),
            ({"dynamic_batching": True}, "dynamic_batching"),
            ({"max_batch": 16}, "max_batch_size"),
            ({"compute": "real"}, "compute"),
            ({"inputs": (FakeTensor("x", "FP32", (4, 4)),)}, "inputs"),
        ],
    )
    def test_a_model_that_is_not_the_calibrated_one(
        self, server: FakeServer, ledger: Ledger, change: dict[str, Any], aspect: str
    ) -> None:
        of = frozen(server, ledger)
        before = server.log()
        renew(server, FakeScript((replace(MODEL, **change),)))
        error = self.refused(server, ledger, of=of)
        assert isinstance(error, UsageError)
        if aspect != "inputs":
            assert error.problem == f"the server's model is not the one that was calibrated: its {aspect} differs"
        assert server.log(since=before[-1].number if before else 0) == ()

    def test_a_model_that_is_gone(self, server: FakeServer, ledger: Ledger) -> None:
        of = frozen(server, ledger)
        server.install(FakeScript(()))
        assert self.refused(server, ledger, of=of).problem == "the server does not serve this model"

    def test_flights_of_which_the_prediction_says_nothing(self, server: FakeServer, ledger: Ledger) -> None:
        error = self.refused(server, ledger, flights=(3, 17))
        assert (error.where, error.observed) == ("--flights", "17")

    @pytest.mark.parametrize("flights", [(1, 2), (3,)])
    def test_flights_from_which_nothing_could_be_judged(
        self, server: FakeServer, ledger: Ledger, flights: tuple[int, ...]
    ) -> None:
        error = self.refused(server, ledger, flights=flights)
        assert error.problem == "what was claimed could not be judged from these flights"

    def test_published_figures_have_no_server(self, server: FakeServer, ledger: Ledger) -> None:
        published = calibration(server).model_copy(update={"server": None})
        made = predict(published, k=None, plan=builders.plan(), software=builders.SOFTWARE)
        of = ledger.load_frozen(ledger.freeze(made))
        assert "there is no server to measure on" in self.refused(server, ledger, of=of).problem

    def test_a_name_that_is_taken_is_refused_before_anything_runs(self, server: FakeServer, ledger: Ledger) -> None:
        of = frozen(server, ledger)
        (ledger.folder / "taken.json").write_text("mine")
        error = self.refused(server, ledger, of=of, name="taken")
        assert error.problem == "there is such a measurement already"
        assert (ledger.folder / "taken.json").read_text() == "mine"

    def test_a_name_that_is_none(self, server: FakeServer, ledger: Ledger) -> None:
        assert self.refused(server, ledger, name="../x").problem == "this cannot be a name"

    @pytest.mark.parametrize(
        "kind",
        [FaultKind.STATUS, FaultKind.CLOSE_BEFORE_ANSWER, FaultKind.WRONG_ID, FaultKind.LONG_BODY],
    )
    def test_a_server_that_fails_in_the_middle(self, server: FakeServer, ledger: Ledger, kind: FaultKind) -> None:
        of = frozen(server, ledger)
        server.install(replace(SCRIPT, faults=(Fault(kind, at=(25,)),)))
        error = self.refused(server, ledger, of=of, begun=True)
        assert isinstance(error, ServerError)
        assert [begun.name for state in ledger.states() for begun in state.unfinished] == ["meas"]

    @pytest.mark.parametrize("kind", [FaultKind.COUNTERS_RESET, FaultKind.COUNTERS_BACKWARD])
    def test_counters_that_do_not_agree(
        self, server: FakeServer, ledger: Ledger, kind: FaultKind, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("b2gmodel.live.kserve._BOOKING_TIMEOUT_S", 0.1)
        of = frozen(server, ledger)
        server.install(replace(SCRIPT, faults=(Fault(kind, at=(25,)),)))
        assert isinstance(self.refused(server, ledger, of=of, begun=True), ServerError | EvidenceError)

    def test_foreign_traffic(self, server: FakeServer, ledger: Ledger) -> None:
        of = frozen(server, ledger, seconds=0.3)
        message = InferMessage(described(server)[0], 2)
        headers, body = message.encode("foreign", [(bytes(48),)] * 2)
        ended = threading.Event()

        def intrude() -> None:
            connection = http.client.HTTPConnection(server.address, timeout=30)
            while not ended.is_set():
                connection.request("POST", message.target, b"".join(body), dict(headers))
                connection.getresponse().read()
                ended.wait(0.02)
            connection.close()

        intruder = threading.Thread(target=intrude)
        intruder.start()
        try:
            error = self.refused(server, ledger, of=of, begun=True)
        finally:
            ended.set()
            intruder.join(30)
        assert isinstance(error, EvidenceError)
        assert error.problem == "the server's count of executions is not ours"

    def test_a_dead_server(self, server: FakeServer, ledger: Ledger) -> None:
        of = frozen(server, ledger)
        with FakeServer.start(SCRIPT) as other:
            dead = target_of(other)
        with pytest.raises(UsageError, match="cannot reach the server"):
            measure_frozen(ledger, *of, dead, flights=None, name="meas", progress=lambda *_: None)
        assert [entry.event for entry in ledger.entries()] == ["freeze"]


def test_that_it_is_begun_is_entered_before_the_first_run(server: FakeServer, ledger: Ledger) -> None:
    of = frozen(server, ledger, seconds=0.001)
    looks = []

    def look(stage: str, share: float) -> None:
        assert [(entry.event, entry.file) for entry in ledger.entries()][1:] == [("begin", "m.json")]
        assert not (ledger.folder / "m.json").exists()
        looks.append(stage)

    measure_frozen(ledger, *of, target_of(server), flights=None, name="m", progress=look)
    assert len(looks) == 8
    assert [entry.event for entry in ledger.entries()] == ["freeze", "begin", "measure"]
    assert ledger.states()[0].unfinished == ()


def test_progress_names_session_and_run(server: FakeServer, ledger: Ledger) -> None:
    told: list[tuple[str, float]] = []
    of = frozen(server, ledger, seconds=0.001)
    measure_frozen(ledger, *of, target_of(server), flights=None, name="m", progress=lambda *a: told.append(a))
    assert len(told) == 8
    assert told[0][0].startswith("cal-k8 session 1/2 C")
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_the_loop_is_left_empty(server: FakeServer, ledger: Ledger) -> None:
    """After a failed run no flight goes on in the background: the next loop starts with nothing but itself."""
    of = frozen(server, ledger)
    server.install(replace(SCRIPT, faults=(Fault(FaultKind.STATUS, at=(25,)),)))
    with pytest.raises(ServerError):
        measured(server, ledger, of)

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    assert asyncio.run(tasks()) == 1
