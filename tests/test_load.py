"""The load generator: its schedules by hand, its latencies by a played clock, its counts against a real proxy's."""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hdrh.log import HistogramLogReader
from proxy_rig import Held, Rig, rig, run
from scipy import stats
from test_serve import MODEL as FAKE_MODEL
from test_serve import served

from b2gmodel.cli import load_commands
from b2gmodel.cli import run as b2g
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.live.fake import FakeScript, FakeServer
from b2gmodel.live.kserve import Tensor
from b2gmodel.live.load import ClosedLoop, LoadResult, LoadSpec, OpenLoop, counts_agree, run_load
from b2gmodel.live.load_plan import Arrivals, ClosedPlan, OpenPlan, Plan, Send, intended_offsets
from b2gmodel.live.load_tally import LoadOutcome, Tally, Times
from b2gmodel.live.messages import WireError
from b2gmodel.live.observer import Outcome
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.workloads import fingerprint

MS = 1_000_000
S = 1000 * MS
INPUT = TensorSpec("x", "INT32", (2,))
SHORT = LoadSpec("127.0.0.1", 1, "m", (INPUT,), ClosedLoop(4), duration_s=0.4, warmup_s=0.1, patience_s=20)


# schedules


def test_constant_arrivals_are_where_they_should_be() -> None:
    assert list(intended_offsets(Arrivals.CONSTANT, 4, 1, 0)) == [0, 250 * MS, 500 * MS, 750 * MS]
    many = list(intended_offsets(Arrivals.CONSTANT, 3000, 5, 0))
    assert many == [round(i * S / 3000) for i in range(15_000)]


def test_poisson_arrivals_follow_their_law_and_their_seed() -> None:
    times = list(intended_offsets(Arrivals.POISSON, 1000, 20, seed=7))
    assert times == list(intended_offsets(Arrivals.POISSON, 1000, 20, seed=7))
    assert times != list(intended_offsets(Arrivals.POISSON, 1000, 20, seed=8))
    expected = np.cumsum(np.random.default_rng(7).exponential(1e-3, 4096))
    assert times[:4096] == [round(each * S) for each in expected]
    assert all(before <= after for before, after in pairwise(times))
    assert times[-1] < 20 * S
    gaps = np.diff(np.array(times) / S)
    assert stats.kstest(gaps, stats.expon(scale=1e-3).cdf).pvalue > 0.01
    counts = np.histogram(times, bins=400, range=(0, 20 * S))[0]
    dispersion = counts.var(ddof=1) / counts.mean() * 399
    assert 0.01 < stats.chi2.cdf(dispersion, 399) < 0.99
    # Neither do gaps remember each other, across the chunks that they are drawn in.
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 3 / np.sqrt(len(gaps))


def test_an_open_loop_by_hand() -> None:
    plan = OpenPlan(2, 100, iter([0, 10, 20, 30, 40]))
    assert plan.next_ns(0) == 100
    assert plan.due(99) == []
    assert plan.due(100) == [Send(0, 100, False)]
    assert plan.due(125) == [Send(1, 110, False)]  # 120 is due, too, but no lane is free
    assert plan.next_ns(125) is None
    plan.free(1, 127)
    assert plan.due(127) == [Send(1, 120, True)]
    plan.free(0, 128)
    assert plan.next_ns(128) == 130
    plan.withdraw(0)
    assert plan.due(200) == []
    plan.free(0, 200)
    assert plan.due(200) == [Send(0, 130, True)]
    assert not plan.exhausted(1000)
    assert plan.unsent() == 1


def test_a_closed_loop_by_hand() -> None:
    plan = ClosedPlan(2, 100, 200, think_ns=20)
    assert plan.due(100) == [Send(0, None, False), Send(1, None, False)]
    assert plan.next_ns(100) == 200
    plan.free(1, 150)
    plan.free(0, 151, pause_ns=40)
    assert (plan.due(151), plan.next_ns(151)) == ([], 170)
    assert plan.due(170) == [Send(1, None, False)]
    assert plan.next_ns(170) == 191
    plan.withdraw(0)
    assert plan.due(195) == []
    plan.free(1, 195)
    assert (plan.exhausted(199), plan.exhausted(200), plan.due(300), plan.next_ns(300)) == (False, True, [], None)
    assert plan.unsent() == 0


# latency


def play(plan: Plan, answer_ns: Callable[[int], int], window_ns: tuple[int, int]) -> Tally:
    """The plan against a server that answers what is sent at t at ``answer_ns(t)``, on a clock of the test's own."""
    tally, answers = Tally(window_ns), list[tuple[int, int, int]]()
    now_ns = 0
    while True:
        while answers and answers[0][0] == now_ns:
            _, lane, intended_ns = heapq.heappop(answers)
            tally.end(LoadOutcome.ANSWERED, intended_ns, now_ns)
            plan.free(lane, now_ns)
        for send in plan.due(now_ns):
            intended_ns = now_ns if send.intended_ns is None else send.intended_ns
            tally.send(intended_ns, now_ns, send.starved)
            heapq.heappush(answers, (answer_ns(now_ns), send.lane, intended_ns))
        times = [each for each in (plan.next_ns(now_ns), answers[0][0] if answers else None) if each is not None]
        if not times:
            return tally
        now_ns = min(times)


def stalled(sent_ns: int) -> int:
    """1 ms after it was sent, but nothing from 1 s to 2 s."""
    return (2 * S if S <= sent_ns < 2 * S else sent_ns) + MS


@pytest.mark.parametrize("lanes", [8, 512])
def test_a_stall_shows_in_an_open_loop_even_where_its_lanes_run_out(lanes: int) -> None:
    plan = OpenPlan(lanes, 0, intended_offsets(Arrivals.CONSTANT, 100, 3, 0))
    tally = play(plan, stalled, (0, 3 * S))
    times = tally.latency.quantiles
    assert times is not None
    # 200 answers after 1 ms; the 100 due within the stall waited for its end: 1001, 991, ... 11 ms.
    assert times.count == 300
    assert times.p50_ns == pytest.approx(MS, rel=2e-3)
    assert times.p90_ns == pytest.approx(701 * MS, rel=2e-2)
    assert times.p99_ns == pytest.approx(971 * MS, rel=2e-2)
    assert times.max_ns == pytest.approx(1001 * MS, rel=2e-3)
    # With 8 lanes 92 of them had none when they were due, nor had the two that came while the 8 caught up.
    assert tally.starved == (94 if lanes == 8 else 0)
    assert tally.late == tally.starved


def test_a_closed_loop_omits_what_its_clients_did_not_ask_for() -> None:
    tally = play(ClosedPlan(8, 0, 3 * S, think_ns=79 * MS), stalled, (0, 3 * S))
    times = tally.latency.quantiles
    assert times is not None
    assert times.p90_ns == pytest.approx(MS, rel=2e-3)
    assert times.max_ns > 900 * MS
    assert tally.sent == tally.outcomes[LoadOutcome.ANSWERED] == times.count


def test_the_window_leaves_out_warm_up_and_drain_but_no_slow_answer() -> None:
    tally = Tally((10 * MS, 20 * MS))
    for intended_ns, answered_ns in ((9 * MS, 11 * MS), (10 * MS, 19 * MS), (19 * MS, 50 * MS), (20 * MS, 21 * MS)):
        tally.send(intended_ns, intended_ns, False)
        tally.end(LoadOutcome.ANSWERED, intended_ns, answered_ns)
    tally.send(12 * MS, 14 * MS, True)
    tally.end(LoadOutcome.BUSY, 12 * MS, 15 * MS)
    times = tally.latency.quantiles
    assert times is not None
    assert (tally.window_answers, times.count, tally.late, tally.starved, tally.sent) == (2, 2, 1, 1, 5)
    assert times.max_ns == pytest.approx(31 * MS, rel=2e-3)
    assert tally.outcomes[LoadOutcome.BUSY] == 1


def test_quantiles_to_three_digits_and_none_of_nothing() -> None:
    times = Times()
    assert times.quantiles is None
    for time_ns in range(MS, 1001 * MS, MS):
        times.record(time_ns)
    it = times.quantiles
    assert it is not None
    found = (it.min_ns, it.p50_ns, it.p90_ns, it.p95_ns, it.p99_ns, it.p999_ns, it.max_ns)
    assert found == pytest.approx([MS, 500 * MS, 900 * MS, 950 * MS, 990 * MS, 999 * MS, 1000 * MS], rel=1e-3)
    assert it.mean_ns == pytest.approx(500.5 * MS, rel=1e-3)
    times.record(10**18)
    times.record(-5)
    assert times.quantiles is not None
    assert times.quantiles.count == 1002


def test_reasons_are_bounded() -> None:
    tally = Tally((0, 1))
    for reason in range(20):
        tally.lose(f"reason {reason}")
    assert len(tally.lost_reasons) == 9
    assert tally.lost_reasons["other reasons"] == 12


# what a load may be


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duration_s": 0.0}, "duration_s"),
        ({"duration_s": float("nan")}, "duration_s"),
        ({"duration_s": 1e9}, "duration_s"),
        ({"warmup_s": 0.4}, "the warm-up leaves nothing"),
        ({"warmup_s": -1.0}, "the warm-up leaves nothing"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"patience_s": 0.0}, "patience_s"),
        ({"seed": -1}, "seed"),
        ({"port": 0}, "port"),
        ({"loop": ClosedLoop(0)}, "clients"),
        ({"loop": ClosedLoop(9000)}, "clients"),
        ({"loop": ClosedLoop(1, -1.0)}, "think_s"),
        ({"loop": OpenLoop(0)}, "rate_per_s"),
        ({"loop": OpenLoop(float("inf"))}, "rate_per_s"),
        ({"loop": OpenLoop(1, connections=0)}, "connections"),
        ({"loop": OpenLoop(1e5), "duration_s": 3600.0}, "rate_per_s times duration_s"),
        ({"inputs": (TensorSpec("x", "BYTES", (1,)),)}, "input x: a datatype that cannot be made up"),
        ({"inputs": (TensorSpec("x", "FP64", (3000, 3000)),)}, "payload_bytes"),
        ({"verify": True, "inputs": (INPUT, TensorSpec("z", "FP32", (1,)))}, "fingerprint"),
    ],
)
def test_what_a_load_may_not_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(SHORT, **change)


def test_names_that_the_protocol_does_not_allow() -> None:
    for change in ({"model": ""}, {"inputs": ()}, {"inputs": (INPUT, INPUT)}):
        with pytest.raises(WireError):
            replace(SHORT, **change)  # type: ignore[arg-type]


# against a real proxy


async def load(it: Rig, **change: Any) -> LoadResult:
    """A short load on the rig's proxy."""
    return await asyncio.to_thread(run_load, replace(SHORT, port=it.address[1], **change))


async def answer_all(it: Rig, answer: Callable[[int, Held], None] = lambda _n, held: held.succeed()) -> None:
    number = 0
    while True:
        answer(number, await it.batch())
        number += 1


def checked(it: Rig, result: LoadResult) -> LoadResult:
    """The result, whose counts have to be the proxy's, and to add up."""
    assert counts_agree(result, it.proxy.snapshot()) == []
    assert result.sent == sum(result.outcomes.values())
    assert LoadResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    return result


def test_a_closed_loop_agrees_with_its_proxy() -> None:
    async def test() -> None:
        async with rig(k=2, flights=2, formation_deadline_ns=0) as it:
            answering = asyncio.create_task(answer_all(it))
            before = it.proxy.snapshot()
            result = checked(it, await load(it))
            answering.cancel()
            assert result.outcomes[LoadOutcome.ANSWERED] == result.sent > 4
            assert result.latency is not None
            assert 0 < result.window_answers <= result.sent
            assert result.window_s == pytest.approx(0.3)
            assert (result.lateness, result.late, result.starved, result.unsent) == (None, None, None, 0)
            assert (result.lost_reasons, result.reconnects, result.distinct_payloads) == ({}, 0, 4)
            after = it.proxy.snapshot()
            assert counts_agree(result, after, before) == []
            # The check finds what differs: nothing can be counted twice, or not at all.
            more = replace(after, received=after.received + 1, outcomes={**after.outcomes, Outcome.BUSY: 1})
            assert [line.split(":")[0] for line in counts_agree(result, more)] == ["received", "busy"]
            fewer = replace(after, bytes_in=after.bytes_in - 1, bytes_out=0)
            assert [line.split(":")[0] for line in counts_agree(result, fewer)] == ["bytes in", "bytes out"]
            assert counts_agree(result, after, after) != []

    run(test())


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_an_open_loop_sends_all_that_it_is_meant_to(arrivals: Arrivals) -> None:
    async def test() -> None:
        async with rig(k=1, flights=2, queue=64) as it:
            answering = asyncio.create_task(answer_all(it))
            result = checked(it, await load(it, loop=OpenLoop(100, arrivals, 32), seed=3))
            answering.cancel()
            meant = len(list(intended_offsets(arrivals, 100, 0.4, 3)))
            assert result.outcomes[LoadOutcome.ANSWERED] == result.sent == meant
            assert (result.unsent, result.distinct_payloads) == (0, 32)
            assert result.lateness is not None
            assert result.lateness.count == meant

    run(test())


def test_busy_and_upstream_are_counted() -> None:
    async def test() -> None:
        async with rig(k=1, flights=1, queue=1) as it:

            def answer(number: int, held: Held) -> None:
                held.fail() if number % 2 else held.succeed()

            answering = asyncio.create_task(answer_all(it, answer))
            result = checked(it, await load(it, loop=ClosedLoop(32)))
            answering.cancel()
            counts = result.outcomes
            assert min(counts[LoadOutcome.BUSY], counts[LoadOutcome.UPSTREAM], counts[LoadOutcome.ANSWERED]) > 0
            assert counts[LoadOutcome.LOST] == 0

    run(test())


def test_a_silent_server_makes_deadlines_pass_or_requests_unanswered() -> None:
    async def test() -> None:
        async with rig(k=1, flights=1, queue=8) as it:
            result = checked(it, await load(it, deadline_s=0.02, loop=ClosedLoop(2)))
            assert result.outcomes[LoadOutcome.DEADLINE] == result.sent >= 2
            assert (result.latency, result.window_answers) == (None, 0)
        async with rig(k=1, flights=1, queue=8) as it:
            result = await load(it, patience_s=0.1)
            await it.until("connections", 0)
            assert checked(it, result).outcomes[LoadOutcome.UNANSWERED] == 4
            assert it.count(Outcome.DISCONNECTED) == 4

    run(test())


def test_a_proxy_that_leaves_mid_load() -> None:
    async def test() -> None:
        async with rig(k=1, flights=1, queue=8) as it:
            loading = asyncio.create_task(load(it, patience_s=1, duration_s=1.0, loop=OpenLoop(200, connections=8)))
            for _ in range(20):
                (await it.batch()).succeed()
            while it.proxy.snapshot().queue_depth < 2:
                await asyncio.sleep(0)
            draining = asyncio.create_task(it.proxy.drain(10))
            answering = asyncio.create_task(answer_all(it))
            assert await draining
            result = checked(it, await loading)
            answering.cancel()
            assert result.outcomes[LoadOutcome.ANSWERED] >= 22
            assert result.unsent > 0
            assert "draining: the proxy is shutting down" in result.lost_reasons

    run(test())


def test_lost_connections_are_counted_and_opened_again() -> None:
    async def test() -> None:
        async with rig(k=1, flights=1, queue=8) as it:
            loading = asyncio.create_task(load(it, duration_s=1.5))
            for _ in range(20):
                (await it.batch()).succeed()
            held = await it.batch()
            await it.until("open", 4)  # one in flight, three waiting: none has its answer on the way
            for connection in list(it.proxy._connections):
                connection.abort()
            await it.until("connections", 0)
            held.succeed()
            answering = asyncio.create_task(answer_all(it))
            result = checked(it, await loading)
            answering.cancel()
            assert (result.outcomes[LoadOutcome.LOST], result.reconnects) == (4, 4)
            assert sum(result.lost_reasons.values()) == 4
            assert it.count(Outcome.DISCONNECTED) == 4
            assert result.outcomes[LoadOutcome.ANSWERED] > 24  # the clients came back

    run(test())


def test_answers_are_verified_against_their_requests() -> None:
    async def test() -> None:
        async with rig(k=2, flights=1, formation_deadline_ns=0) as it:

            def answer(number: int, held: Held) -> None:
                marks = [fingerprint(row) for row in held.rows]
                if number == 3:
                    marks[0] = b"\xff" * 16
                results = [(Tensor("y", "FP32", (5,), memoryview(mark + bytes(4))),) for mark in marks]
                held.answer.set_result(tuple(results))

            inputs = (TensorSpec("x", "INT32", (2,)),)
            answering = asyncio.create_task(answer_all(it, answer))
            result = checked(it, await load(it, inputs=inputs, verify=True))
            answering.cancel()
            assert result.sent > 8
            assert result.wrong_answers == 1

    run(test())


def test_loads_that_cannot_be() -> None:
    async def test() -> None:
        async with rig() as it:
            with pytest.raises(UsageError, match=r"refuses these requests: input x is INT32 \[3\]"):
                await load(it, inputs=(TensorSpec("x", "INT32", (3,)),))
        with pytest.raises(UsageError, match=r"no connection to the proxy.*is `b2g serve` running there"):
            await load(it)
        async with rig(connections=2) as it:
            # Told before the load begins, or as it does: either way it is said why.
            try:
                result = await load(it, patience_s=0.1)
            except UsageError as error:
                assert "busy: the proxy serves 2 clients at a time" in str(error)  # noqa: PT017
            else:
                assert "busy: the proxy serves 2 clients at a time" in result.lost_reasons

    run(test())


def load_processes(parent: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(parent), "-f", "load_process"], capture_output=True, check=False)
    return [int(word) for word in done.stdout.split()]


def test_a_killed_generator_is_an_error() -> None:
    async def test() -> None:
        async with rig() as it:

            def kill(_stage: str, _share: float) -> None:
                for pid in load_processes(os.getpid()):
                    os.kill(pid, signal.SIGKILL)

            with pytest.raises(EvidenceError, match="ended before its result: saw 'killed by SIGKILL'"):
                await asyncio.to_thread(run_load, replace(SHORT, port=it.address[1], duration_s=20.0), kill)
            assert load_processes(os.getpid()) == []

    run(test())


def test_a_load_ends_with_its_parent() -> None:
    async def test() -> None:
        async with rig() as it:
            program = (
                "from b2gmodel.live.load import *; from b2gmodel.live.tensors import TensorSpec\n"
                f"run_load(LoadSpec('127.0.0.1', {it.address[1]}, 'm', (TensorSpec('x', 'INT32', (2,)),), "
                "ClosedLoop(2), duration_s=25.0), lambda stage, share: print(stage, flush=True))"
            )
            parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
            assert parent.stdout is not None
            assert await parent.stdout.readline() == b"load\n"
            await it.until("open", 2)
            parent.kill()
            await parent.wait()
            await it.until("connections", 0)

    run(test())


# the command


def test_the_command_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "latency.hdr"
    options = ["--model", "m", "--shape", "x:4,3", "--duration", "500ms", "--warmup", "100ms", "--clients", "4"]
    with FakeServer.start(FakeScript((FAKE_MODEL,))) as fake, served(fake.address, "m", "-k", "2", "--json") as it:
        assert b2g(["load", "--to", f"{it.host}:{it.port}", *options, "--json", "--hdr", str(log)]) == 0
        ours = json.loads(capsys.readouterr().out)
        assert b2g(["load", "--to", f"{it.host}:{it.port}", *options, "--hdr", str(log)]) == 2
        assert "name a file that is not there yet" in capsys.readouterr().err
        assert b2g(["load", "--to", f"{it.host}:{it.port}", *options, "--rate", "5"]) == 2
        assert "either a closed loop or an open one" in capsys.readouterr().err
        theirs = json.loads(it.stop()[1])
    assert ours["outcomes"]["answered"] == ours["sent"] > 0
    assert theirs["outcomes"]["answered"] >= ours["sent"]
    assert ours["throughput_per_s"] == pytest.approx(ours["window_answers"] / 0.4)
    reader = HistogramLogReader(str(log), None)
    histogram = reader.get_next_interval_histogram()
    reader.close()
    assert histogram.get_total_count() == ours["latency"]["count"]
    assert histogram.get_max_value() == pytest.approx(ours["latency"]["max_ns"], rel=1e-3)


def test_what_it_says() -> None:
    tally = Tally((0, 10 * S))
    for number in range(1000):
        tally.send(0, 0, False)
        tally.end(LoadOutcome.ANSWERED if number < 990 else LoadOutcome.BUSY, 0, (number + 1) * MS)
    result = LoadResult(
        spec=replace(SHORT, loop=OpenLoop(100.0), duration_s=11.0, warmup_s=1.0),
        begun_unix_s=0.0,
        sent=1000,
        outcomes=tally.outcomes,
        unsent=0,
        late=12,
        starved=0,
        window_s=10.0,
        window_answers=990,
        latency=tally.latency.quantiles,
        lateness=tally.lateness.quantiles,
        latency_hdr=tally.latency.encoded(),
        wrong_answers=0,
        lost_reasons={"draining: the proxy is shutting down": 2},
        reconnects=0,
        distinct_payloads=512,
        request_bytes=8000,
        result_bytes=7920,
        cpu_share=0.25,
    )
    assert "\n".join(load_commands._lines(result)) == (
        "load: 99.0 request/s, p50 495 ms, p99 980 ms; 1000 requests: 990 answered, 10 busy\n"
        "  loop       open, poisson at 100 request/s over 512 connections; 11 s, the first 1 s left out\n"
        "  latency    p50 495 ms, p90 891 ms, p95 941 ms, p99 980 ms, p99.9 989 ms, max 990 ms; of 990 requests\n"
        "  answered   990 (99.00%)\n"
        "  busy       10 (1.00%)\n"
        "  connection 2 ended: draining: the proxy is shutting down\n"
        "  verified   990 right answers, 0 wrong\n"
        "  schedule   12 sent over 1 ms late (p99 0 ms), 0 had no free connection, 0 never sent\n"
        "  generator  25% of a core, 512 payloads in memory\n"
        "next: the proxy turned requests away: lower the load, or raise its --queue or -M"
    )
