"""What a study's run comes to: by hand for small ones, and a control for each check that can refuse one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from b2gmodel.errors import B2GError, EvidenceError, ServerError
from b2gmodel.flights import ExchangeTimes, Flight
from b2gmodel.live.bench import Driven, Setting, check_counts
from b2gmodel.live.cpu import cpu_time_ns, listening_process, process_tree
from b2gmodel.live.kserve import BatchCounters, ModelCounters
from b2gmodel.live.load_tally import Quantiles
from b2gmodel.live.meter import Meter, Usage
from b2gmodel.live.study_take import Figures, check_balance, quantiles_of, setting_of, table_of, values_of
from b2gmodel.live.target import Endpoint
from b2gmodel.study_records import Cell

MS = 1_000_000


def counters(executions: dict[int, int], queue_ns: int = 0, service_ns: int = 4 * MS) -> ModelCounters:
    """After that many executions of each size, each of them as long."""
    return ModelCounters(
        executions=sum(executions.values()),
        inferences=sum(size * count for size, count in executions.items()),
        queue_ns=queue_ns,
        by_batch_size={n: BatchCounters(count, 0, count * service_ns, 0) for n, count in executions.items()},
    )


NOTHING = counters({})
C3 = Setting("C3", 4, 1, 10)
C2 = Setting("C2", 1, 4, 4)


class TestCounts:
    def test_what_agrees(self) -> None:
        check_counts(C3, [4, 4, 2], NOTHING, counters({4: 2, 2: 1}), "x")
        check_counts(C2, [1, 1, 1, 1], NOTHING, counters({1: 1, 3: 1}), "x")
        check_counts(C2, [1, 1], NOTHING, counters({1: 2}), "x")

    @pytest.mark.parametrize(
        ("setting", "sizes", "after", "observed"),
        [
            (C3, [4, 4, 2], {4: 3}, "3, of which 3 of 4 requests"),
            (C3, [4, 4, 2], {4: 2}, "2, of which 2 of 4 requests"),
            (C3, [4, 4, 2], {4: 2, 2: 2}, "4, of which 2 of 4 requests"),
            (C3, [4, 4], {4: 1, 8: 1}, "2, of which 1 of 4 requests"),
            (C2, [1, 1, 1], {2: 2}, "4 requests in 2 executions"),
            (C2, [1, 1, 1], {2: 1}, "2 requests in 1 executions"),
            (C2, [1], {}, "0 requests in 0 executions"),
        ],
    )
    def test_what_does_not(self, setting: Setting, sizes: Sequence[int], after: dict[int, int], observed: str) -> None:
        with pytest.raises(EvidenceError) as caught:
            check_counts(setting, sizes, NOTHING, counters(after), "x")
        assert caught.value.problem == "the server's count of executions is not ours"
        assert caught.value.observed == observed

    def test_balance(self) -> None:
        check_balance("x", {"sent": 3, "answered": 3})
        with pytest.raises(EvidenceError, match="the run's counts do not balance: saw 'sent 3, answered 2'"):
            check_balance("x", {"sent": 3, "answered": 2})


class TestSetting:
    @pytest.mark.parametrize(
        ("setting", "concurrency", "round_flights"),
        [
            (Setting("C3", 4, 1), 4, 1),
            (Setting("C4", 4, 3), 12, 3),
            (Setting("C3", 4, 1, 10), 10, 3),
            (Setting("C4", 4, 2, 16), 16, 4),
            (Setting("D0", 1, 8, 8), 8, 8),
        ],
    )
    def test_a_round_gives_every_client_its_turn(self, setting: Setting, concurrency: int, round_flights: int) -> None:
        assert (setting.concurrency, setting.round_flights) == (concurrency, round_flights)

    def test_of_a_cell(self) -> None:
        assert setting_of(Cell(placement="C4", k=4, flights=2, concurrency=9)) == Setting("C4", 4, 2, 9)


def test_quantiles_by_hand() -> None:
    assert quantiles_of([30, 10, 20, 40]) == Quantiles(4, 10, 25.0, 20, 40, 40, 40, 40, 40)
    assert quantiles_of(range(1, 1001)) == Quantiles(1000, 1, 500.5, 500, 900, 950, 990, 999, 1000)
    assert quantiles_of([7]) == Quantiles(1, 7, 7.0, 7, 7, 7, 7, 7, 7)


def flight(number: int, size: int, delivered_ms: int) -> Flight:
    """Ten milliseconds from its seal to its delivery."""
    sealed_ns = (delivered_ms - 10) * MS
    return Flight(number, size, sealed_ns, sealed_ns, ExchangeTimes(sealed_ns), delivered_ms * MS, False)


FIGURES = Figures(
    flights=(flight(0, 4, 10), flight(1, 4, 20), flight(2, 4, 30), flight(3, 2, 40)),
    settled=1,
    stopped=3,
    elapsed_s=0.05,
    duration_s=0.02,
    requests=8,
    sent=14,
    answered=14,
    latency=quantiles_of([10 * MS, 30 * MS]),
    latency_hdr="HISTF",
    before=counters({4: 5}, queue_ns=100),
    after=counters({4: 8, 2: 1}, queue_ns=100 + 8 * MS),
    usage=Usage(0.01, None, 28_000, 1_400),
    load_s=None,
)
SINGLE = Cell(placement="C3", k=4, flights=1, concurrency=10)


class TestValues:
    def test_by_hand(self) -> None:
        values = values_of(FIGURES, SINGLE)
        assert values["throughput_per_s"] == pytest.approx(400.0)
        assert (values["batches"], values["delivered_batches"], values["batch_sizes"]) == (2, 4, {"4": 2})
        assert (values["server_executions"], values["server_requests"]) == (4, 14)
        assert values["server_batch_sizes"] == {"2": 1, "4": 3}
        assert values["cycle_s"] == pytest.approx(0.010)
        assert values["service_s"] == pytest.approx(0.004)
        assert values["transport_s"] == pytest.approx(0.006)
        assert values["queue_s"] == pytest.approx(0.002)
        assert (values["mean_s"], values["p50_s"], values["p99_s"]) == pytest.approx((0.020, 0.010, 0.030))
        assert (values["sent_bytes_per_request"], values["received_bytes_per_request"]) == (2_000, 100)
        assert (values["failed"], values["cpu_proxy_s"], values["cpu_server_s"]) == (0, 0.01, None)

    def test_no_transport_with_more_in_flight(self) -> None:
        assert values_of(FIGURES, SINGLE.model_copy(update={"flights": 2}))["transport_s"] is None

    def test_bytes_that_are_not_known_are_none(self) -> None:
        values = values_of(replace(FIGURES, usage=Usage(0.01, 0.02, None, None)), SINGLE)
        assert (values["sent_bytes_per_request"], values["received_bytes_per_request"]) == (None, None)

    def test_a_server_without_batch_statistics_is_told(self) -> None:
        with pytest.raises(ServerError, match="hold no batch sizes"):
            values_of(replace(FIGURES, after=FIGURES.before), SINGLE)

    def test_a_counter_that_ran_backwards_is_told(self) -> None:
        with pytest.raises(B2GError, match="ran backwards"):
            values_of(replace(FIGURES, before=FIGURES.after, after=FIGURES.before), SINGLE)

    def test_the_table_has_every_flight(self) -> None:
        table = table_of(FIGURES)
        assert table["counted"] == [False, True, True, False]
        assert table["size"] == [4, 4, 4, 2]
        assert table["send_end_ns"] == [None] * 4
        assert {len(column) for column in table.values()} == {4}

    def test_the_window_opens_with_the_delivery_before_it(self) -> None:
        assert Driven(FIGURES.flights, 1, 3).window_ns == (10 * MS, 30 * MS)


class TestMeter:
    def test_bytes_are_those_to_the_server_and_back(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
            port = listener.getsockname()[1]
            meter = Meter(Endpoint("127.0.0.1", port, False, None))
            with (
                socket.create_connection(("127.0.0.1", port)) as client,
                socket.create_connection(other.getsockname()) as elsewhere,
            ):
                server, _ = listener.accept()
                stranger, _ = other.accept()
                with server, stranger:
                    before = meter.read()
                    client.sendall(bytes(1000))
                    elsewhere.sendall(bytes(77))
                    received = 0
                    while received < 1000:
                        received += len(server.recv(1000))
                    server.sendall(bytes(300))
                    received = 0
                    while received < 300:
                        received += len(client.recv(300))
                    used = meter.read().since(before)
        assert (used.sent_bytes, used.received_bytes) == (1000, 300)
        assert used.ours_s > 0
        assert used.server_s is not None  # this process serves the port

    def test_a_server_that_is_not_here_has_no_processor_time(self) -> None:
        assert Meter(Endpoint("192.0.2.1", 80, False, None)).read().server_s is None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            free = listener.getsockname()[1]
        assert Meter(Endpoint("127.0.0.1", free, False, None)).read().server_s is None

    def test_counters_of_closed_connections_make_no_negative_bytes(self) -> None:
        used = Usage(2.0, 1.0, 10, 20).since(Usage(1.0, None, 11, None))
        assert used == Usage(1.0, None, None, None)


class TestCpu:
    def test_a_process_clock_runs_with_its_threads(self) -> None:
        before = cpu_time_ns(os.getpid())
        thread = threading.Thread(target=lambda: sum(range(300_000)))
        thread.start()
        thread.join()
        after = cpu_time_ns(os.getpid())
        assert before is not None
        assert after is not None
        assert after > before
        assert abs(time.process_time_ns() - after) < 1_000 * MS

    def test_the_tree_holds_children_and_the_dead_have_no_clock(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            assert set(process_tree(os.getpid())) >= {os.getpid(), child.pid}
            assert cpu_time_ns(child.pid) is not None
        finally:
            child.communicate(b"\n")
        assert cpu_time_ns(child.pid) is None
        assert child.pid not in process_tree(os.getpid())

    def test_who_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert listening_process(port) == os.getpid()
        assert listening_process(port) is None
