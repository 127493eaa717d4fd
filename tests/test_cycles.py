"""Each cycle has the S that the server booked for that very batch, and D is the rest of it, to the nanosecond."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_bench import MODEL, MS, SCRIPT, endpoint_of, renew, run

from b2gmodel.errors import B2GError, EvidenceError, ServerError
from b2gmodel.flights import Cycle, series_s
from b2gmodel.live.cycles import SingleFlight
from b2gmodel.live.fake import FakeScript, FakeServer, Fault, FaultKind
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.transport import HttpTransport


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


def cycles(
    server: FakeServer, count: int, *, k: int = 8, foreign_k: int | None = None, limit_s: float | None = None
) -> tuple[list[Cycle], tuple[int, int]]:
    """That many cycles and the server's totals over them; ``foreign_k``: a batch of that size before the third."""

    async def main() -> tuple[list[Cycle], tuple[int, int]]:
        endpoint = endpoint_of(server)
        control = ControlPlane(endpoint.host, endpoint.port)
        model = await control.model("m", {})
        transport = HttpTransport(endpoint.host, endpoint.port, model)
        try:
            flight = SingleFlight(transport, control, model, k, run_id="run", flight_limit_s=limit_s)
            seen = await flight.run(2)
            if foreign_k is not None:
                await transport.infer("foreign", [(bytes(48),)] * foreign_k)
            return seen + await flight.run(count - 2), flight.server_totals()
        finally:
            control.close()
            await transport.aclose()

    return run(main())


@pytest.mark.parametrize("k", [1, 3, 8])
def test_each_cycle_has_what_the_server_booked_for_it(server: FakeServer, k: int) -> None:
    before = server.log()
    seen, totals = cycles(server, 20, k=k)
    log = server.log(since=before[-1].number if before else 0)
    assert [entry.request_id for entry in log] == [f"run.{number}" for number in range(20)]
    for cycle, entry in zip(seen, log, strict=True):
        assert entry.rows == cycle.flight.size == k
        stamps = (
            entry.queue_start_ns,
            entry.compute_start_ns,
            entry.input_end_ns,
            entry.infer_end_ns,
            entry.compute_end_ns,
        )
        queue, start, read, inferred, end = (stamp or 0 for stamp in stamps)
        assert cycle.queue_ns == start - queue
        assert (cycle.compute_input_ns, cycle.compute_infer_ns) == (read - start, inferred - read)
        assert (cycle.compute_output_ns, cycle.service_ns) == (end - inferred, end - start)
    assert totals == (20, sum(cycle.service_ns for cycle in seen))


def test_transport_and_service_make_up_the_cycle_to_the_nanosecond(server: FakeServer) -> None:
    seen, _ = cycles(server, 30)
    for cycle in seen:
        assert cycle.transport_ns + cycle.service_ns == cycle.cycle_ns
        assert cycle.cycle_ns == cycle.flight.delivered_ns - cycle.flight.sealed_ns
        # What the fake injects outside of its instance is D: it waits 1 ms before the batch joins the queue.
        assert cycle.transport_ns >= MS
    assert series_s(seen).tolist() == [[cycle.cycle_ns / 1e9, cycle.service_ns / 1e9] for cycle in seen]


def test_the_server_saw_each_batch_between_our_stamps(server: FakeServer) -> None:
    """One clock on one host: the server's own stamps lie inside the client's, in order."""
    before = server.log()
    seen, _ = cycles(server, 10)
    for cycle, entry in zip(seen, server.log(since=before[-1].number if before else 0), strict=True):
        times = cycle.flight.times
        stamps = [
            cycle.flight.sealed_ns,
            times.send_begin_ns,
            entry.header_ns,
            entry.compute_start_ns,
            entry.compute_end_ns,
            entry.first_byte_ns,
            times.first_byte_ns,
            times.response_end_ns,
            cycle.flight.delivered_ns,
        ]
        assert None not in stamps
        assert stamps == sorted(stamp for stamp in stamps if stamp is not None)


def test_counters_that_come_late_are_waited_for(server: FakeServer) -> None:
    server.install(replace(SCRIPT, faults=(Fault(FaultKind.COUNTERS_LATE, probability=1.0, lag_ns=2 * MS),)))
    before = server.log()
    seen, _ = cycles(server, 5)
    for cycle, entry in zip(seen, server.log(since=before[-1].number if before else 0), strict=True):
        assert cycle.service_ns == (entry.compute_end_ns or 0) - (entry.compute_start_ns or 0)


class TestForeignTraffic:
    @pytest.mark.parametrize("k", [1, 8])
    def test_one_batch_of_somebody_else_is_seen(self, server: FakeServer, k: int) -> None:
        with pytest.raises(
            EvidenceError, match="the model executed something that is not ours: saw '2 executions"
        ) as seen:
            cycles(server, 4, foreign_k=k)
        assert seen.value.where == "m"

    def test_without_it_the_same_run_is_sound(self, server: FakeServer) -> None:
        assert len(cycles(server, 4)[0]) == 4


class TestFaults:
    """A server that fails or garbles fails the run; it never makes a cycle."""

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            (FaultKind.STATUS, "the server refused the batch"),
            (FaultKind.CLOSE_BEFORE_ANSWER, "the server closed the connection before it answered"),
            (FaultKind.CLOSE_MID_BODY, "the server closed after"),
            (FaultKind.LONG_BODY, "bytes after the announced end of the answer"),
            (FaultKind.WRONG_SHAPE, "does not fit the batch"),
            (FaultKind.WRONG_DATATYPE, "does not fit the batch"),
            (FaultKind.WRONG_ID, "does not fit the batch"),
            (FaultKind.COUNTERS_BACKWARD, "."),
            (FaultKind.COUNTERS_RESET, "."),
        ],
    )
    def test_one_fault(
        self, server: FakeServer, kind: FaultKind, problem: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("b2gmodel.live.kserve._BOOKING_TIMEOUT_S", 0.05)
        server.install(FakeScript((MODEL,), faults=(Fault(kind, at=(3,)),)))
        with pytest.raises(B2GError, match=problem) as seen:
            cycles(server, 6)
        assert isinstance(seen.value, ServerError | EvidenceError)

    @pytest.mark.parametrize("kind", [FaultKind.NEVER_ANSWER, FaultKind.SHORT_BODY])
    def test_a_batch_that_hangs(self, server: FakeServer, kind: FaultKind) -> None:
        server.install(FakeScript((MODEL,), faults=(Fault(kind, at=(3,)),)))
        with pytest.raises(ServerError, match="did not answer the batch in time; allowed: 0.2 s"):
            cycles(server, 6, limit_s=0.2)


def test_the_run_of_a_cancelled_calibration_ends(server: FakeServer) -> None:
    async def main() -> None:
        endpoint = endpoint_of(server)
        control = ControlPlane(endpoint.host, endpoint.port)
        model = await control.model("m", {})
        transport = HttpTransport(endpoint.host, endpoint.port, model)
        task = asyncio.create_task(SingleFlight(transport, control, model, 8, run_id="run").run(10_000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        control.close()
        await transport.aclose()

    run(main())
