"""The proxy's core with a transport that the test holds in its hands: whose row is whose, and how flights end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from b2gmodel.batcher import Policy, RefusalReason
from b2gmodel.errors import B2GError, ServerError
from b2gmodel.flights import ExchangeTimes, Flight
from b2gmodel.live.gateway import ExpiredError, Gateway, RefusedError
from b2gmodel.live.tensors import Result, Tensor
from b2gmodel.live.transport import Delivery, Payload, ordinary_memory

T = TypeVar("T")
TIMEOUT_S = 30


class Held:
    """A transport whose batches end when and how the test says; each row's result is its payload."""

    name = "held"

    def __init__(self) -> None:
        self.batches: dict[str, list[bytes]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}

    def payload_memory(self, nbytes: int) -> memoryview:
        return ordinary_memory(nbytes)

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        self.batches[batch_id] = [bytes(part) for (part,) in payloads]
        self._ends[batch_id] = asyncio.get_running_loop().create_future()
        await self._ends[batch_id]
        results = tuple((Tensor("y", "UINT8", (1,), memoryview(row)),) for row in self.batches[batch_id])
        return Delivery(results, ExchangeTimes(1, 2, 3, 4))

    async def warm(self, channels: int) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def end(self, batch_id: str, error: BaseException | None = None) -> None:
        if error is None:
            self._ends[batch_id].set_result(None)
        else:
            self._ends[batch_id].set_exception(error)


class Bench:
    """A gateway over a held transport, and the flights that it reported."""

    def __init__(self, k: int = 2, flights: int = 1, *, queue_limit: int = 100, **options: Any) -> None:
        self.transport = Held()
        self.flights: list[Flight] = []
        formation = options.pop("formation_deadline_ns", None)
        policy = Policy(k, flights, queue_limit, formation)
        self.gateway = Gateway(policy, self.transport, run_id="run", on_flight=self.flights.append, **options)

    def submit(self, *payloads: bytes, deadline_ns: int | None = None) -> list[asyncio.Task[Result]]:
        return [asyncio.create_task(self.gateway.submit((payload,), deadline_ns)) for payload in payloads]


async def turn(until: Callable[[], object]) -> None:
    """Let the loop turn until something is so."""
    while not until():
        await asyncio.sleep(0)


def rows(results: Sequence[Result]) -> list[bytes]:
    return [bytes(tensor.data) for (tensor,) in results]


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(limited())


def test_each_request_gets_its_own_row() -> None:
    async def main() -> None:
        bench = Bench(k=3)
        tasks = bench.submit(b"a", b"b", b"c")
        await turn(lambda: bench.transport.batches)
        assert bench.transport.batches == {"run.0": [b"a", b"b", b"c"]}
        bench.transport.end("run.0")
        assert rows(await asyncio.gather(*tasks)) == [b"a", b"b", b"c"]

    run(main())


def test_as_many_batches_as_flights_and_no_more() -> None:
    async def main() -> None:
        bench = Bench(k=1, flights=2)
        tasks = bench.submit(b"a", b"b", b"c")
        await turn(lambda: len(bench.transport.batches) == 2)
        for _ in range(5):
            await asyncio.sleep(0)
        assert list(bench.transport.batches) == ["run.0", "run.1"]
        bench.transport.end("run.1")
        await turn(lambda: "run.2" in bench.transport.batches)
        bench.transport.end("run.0")
        bench.transport.end("run.2")
        assert rows(await asyncio.gather(*tasks)) == [b"a", b"b", b"c"]
        await turn(lambda: len(bench.flights) == 3)
        assert [flight.flight_id for flight in bench.flights] == [1, 0, 2]

    run(main())


def test_a_flight_is_stamped_from_seal_to_delivery() -> None:
    async def main() -> None:
        bench = Bench()
        before_ns = time.monotonic_ns()
        tasks = bench.submit(b"a", b"b")
        await turn(lambda: bench.transport.batches)
        bench.transport.end("run.0")
        await asyncio.gather(*tasks)
        (flight,) = bench.flights
        assert before_ns <= flight.oldest_arrival_ns <= flight.sealed_ns <= flight.delivered_ns <= time.monotonic_ns()
        assert flight.cycle_ns == flight.delivered_ns - flight.sealed_ns
        assert (flight.size, flight.failed, flight.times) == (2, False, ExchangeTimes(1, 2, 3, 4))

    run(main())


def test_the_flight_is_reported_after_its_results_and_before_its_callers_go_on() -> None:
    """The measurement's closed loop rests on it: whether to go on is decided before anybody does."""

    async def main() -> None:
        order: list[str] = []
        transport = Held()

        async def caller() -> None:
            await gateway.submit((b"a",))
            order.append("caller")

        gateway = Gateway(Policy(1, 1, 9), transport, run_id="run", on_flight=lambda _: order.append("flight"))
        task = asyncio.create_task(caller())
        await turn(lambda: transport.batches)
        transport.end("run.0")
        await task
        assert order == ["flight", "caller"]

    run(main())


def test_a_failed_flight_fails_its_callers_alone() -> None:
    async def main() -> None:
        bench = Bench(k=2, flights=2)
        tasks = bench.submit(b"a", b"b", b"c", b"d")
        await turn(lambda: len(bench.transport.batches) == 2)
        bench.transport.end("run.0", ServerError("broken"))
        bench.transport.end("run.1")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results[:2]] == ["broken", "broken"]
        assert rows([result for result in results[2:] if isinstance(result, tuple)]) == [b"c", b"d"]
        await turn(lambda: len(bench.flights) == 2)
        assert {flight.flight_id: flight.failed for flight in bench.flights} == {0: True, 1: False}
        assert bench.gateway.batcher.counts.failed == 2

    run(main())


def test_a_defect_of_ours_reaches_the_callers_and_is_not_swallowed() -> None:
    async def main() -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
        bench = Bench(k=1)
        (task,) = bench.submit(b"a")
        await turn(lambda: bench.transport.batches)
        bench.transport.end("run.0", ZeroDivisionError("ours"))
        with pytest.raises(B2GError, match="broken off inside the proxy"):
            await task
        await turn(lambda: not bench.gateway._flights)
        assert bench.flights == []
        return seen

    import gc

    seen = run(main())
    gc.collect()
    assert [type(context["exception"]) for context in seen] == [ZeroDivisionError]


def test_a_flight_limit() -> None:
    async def main() -> None:
        bench = Bench(k=1, flight_limit_s=0.001)
        (task,) = bench.submit(b"a")
        with pytest.raises(ServerError, match="did not answer the batch in time; allowed: 0.001 s"):
            await task

    run(main())


class TestCancelling:
    def test_a_waiting_request_is_not_sent(self) -> None:
        async def main() -> None:
            bench = Bench(k=2)
            first, second, third = bench.submit(b"a", b"b", b"c")
            await turn(lambda: bench.transport.batches)
            (fourth,) = bench.submit(b"d")
            third.cancel()
            (fifth,) = bench.submit(b"e")
            bench.transport.end("run.0")
            await turn(lambda: "run.1" in bench.transport.batches)
            assert bench.transport.batches["run.1"] == [b"d", b"e"]
            bench.transport.end("run.1")
            assert rows(await asyncio.gather(first, second, fourth, fifth)) == [b"a", b"b", b"d", b"e"]
            assert third.cancelled()

        run(main())

    def test_one_in_flight_leaves_the_others_their_rows(self) -> None:
        async def main() -> None:
            bench = Bench(k=3)
            tasks = bench.submit(b"a", b"b", b"c")
            await turn(lambda: bench.transport.batches)
            tasks[1].cancel()
            await asyncio.sleep(0)
            bench.transport.end("run.0")
            assert rows([await tasks[0], await tasks[2]]) == [b"a", b"c"]
            await turn(lambda: bench.flights)
            counts = bench.gateway.batcher.counts
            assert (counts.answered, counts.cancelled, counts.in_flight) == (2, 1, 0)

        run(main())

    def test_crossing_with_the_result_is_no_error(self) -> None:
        async def main() -> None:
            bench = Bench(k=1)
            (task,) = bench.submit(b"a")
            await turn(lambda: bench.transport.batches)
            bench.transport.end("run.0")
            await turn(lambda: bench.flights)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert bench.gateway.batcher.counts.answered == 1

        run(main())


class TestRefusing:
    def test_a_full_queue(self) -> None:
        async def main() -> None:
            bench = Bench(k=2, queue_limit=2)
            tasks = bench.submit(b"a", b"b", b"c", b"d", b"e")
            with pytest.raises(RefusedError) as seen:
                await tasks[4]
            assert seen.value.reason is RefusalReason.QUEUE_FULL
            await bench.gateway.abort()
            await asyncio.gather(*tasks, return_exceptions=True)

        run(main())

    def test_a_deadline_that_has_passed_or_passes(self) -> None:
        async def main() -> None:
            bench = Bench(k=2)
            (late,) = bench.submit(b"a", deadline_ns=time.monotonic_ns() - 1)
            with pytest.raises(RefusedError):
                await late
            (waiting,) = bench.submit(b"b", deadline_ns=time.monotonic_ns() + 1_000_000)
            with pytest.raises(ExpiredError):
                await waiting
            assert bench.transport.batches == {}

        run(main())

    def test_draining_sends_what_waits_and_takes_nothing_new(self) -> None:
        async def main() -> None:
            bench = Bench(k=4)
            (task,) = bench.submit(b"a")
            await asyncio.sleep(0)
            drained = asyncio.create_task(bench.gateway.drain())
            await turn(lambda: bench.transport.batches)
            (new,) = bench.submit(b"b")
            with pytest.raises(RefusedError) as seen:
                await new
            assert seen.value.reason is RefusalReason.DRAINING
            assert not drained.done()
            bench.transport.end("run.0")
            await drained
            assert rows([await task]) == [b"a"]

        run(main())

    def test_aborting_ends_every_flight(self) -> None:
        async def main() -> None:
            bench = Bench(k=1, flights=1)
            tasks = bench.submit(b"a", b"b", b"c")
            await turn(lambda: bench.transport.batches)
            await bench.gateway.abort()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [B2GError] * 3
            assert bench.gateway.batcher.is_idle

        run(main())


def test_a_partial_batch_goes_when_it_has_waited_long_enough() -> None:
    async def main() -> None:
        bench = Bench(k=8, formation_deadline_ns=1_000_000)
        (task,) = bench.submit(b"a")
        await turn(lambda: bench.transport.batches)
        bench.transport.end("run.0")
        await task
        (flight,) = bench.flights
        assert flight.size == 1
        assert flight.sealed_ns - flight.oldest_arrival_ns >= 1_000_000

    run(main())


def test_a_thousand_requests_each_end_once_with_their_own_row() -> None:
    async def main() -> None:
        bench = Bench(k=8, flights=3, queue_limit=1000)
        payloads = [number.to_bytes(2, "big") for number in range(1000)]
        tasks = bench.submit(*payloads)
        ended: set[str] = set()
        while len(ended) < 125:
            await turn(lambda: bench.transport.batches.keys() - ended)
            # The youngest flight lands first, so that flights overtake one another.
            batch_id = max(bench.transport.batches.keys() - ended, key=lambda text: int(text[4:]))
            ended.add(batch_id)
            bench.transport.end(batch_id)
        assert rows(await asyncio.gather(*tasks)) == payloads
        assert bench.gateway.batcher.counts.answered == 1000

    run(main())
