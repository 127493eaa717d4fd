"""What the inference server can do to a proxy: every request still has one end, its own, and in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fault_parts import NS, Load
from fault_rig import POLICY, STEP_S, check, during, recovered, results, run
from fault_targets import Fake, Served, fake_model, free_port

from b2gmodel.errors import ServerError
from b2gmodel.flights import ExchangeTimes
from b2gmodel.live.fake import Delays, FakeScript, FakeTensor, Fault, FaultKind
from b2gmodel.live.http import HttpResponse
from b2gmodel.live.infer import InferMessage
from b2gmodel.live.kserve import ModelSpec, Tensor, TensorSpec

SCRIPT = FakeScript((fake_model(),))
SMALL = ModelSpec(
    name="m",
    version="1",
    platform="test",
    max_batch_size=8,
    instances=1,
    dynamic_batching=False,
    inputs=(TensorSpec("x", "UINT8", (1,)),),
    outputs=(TensorSpec("y", "UINT8", (1,)),),
    compute="fake",
    parameters={},
)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake(SCRIPT) as server:
        yield server


def test_killed_and_started_again(fake: Fake) -> None:
    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            load = Load(it.place)

            async def act() -> None:
                before = await results(load)
                fake.kill()
                assert await results(load) <= load.depth * 16  # what had its answer on the way
                await asyncio.to_thread(fake.start)
                await recovered(load, before, within_s=5)

            book = await during(load, act)
            assert book.errors["upstream"] > 0
            ended = check(book, it, errors={"upstream"})
            assert ended["flights_failed"] > 0

    run(test())


def test_restarted_between_two_batches_costs_nothing(fake: Fake) -> None:
    """The connections that it closed are known to be dead before a batch is put on one."""

    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            for _ in range(2):
                load = Load(it.place)
                book = await load.run(requests=200)
                assert book.results == 200
                fake.kill()
                await asyncio.to_thread(fake.start)
            ended = it.end()
            assert (ended["received"], ended["outcomes"]["answered"], ended["flights_failed"]) == (400, 400, 0)

    run(test())


def test_paused_for_longer_than_it_may_take(fake: Fake) -> None:
    async def test() -> None:
        with Served(fake.address, *POLICY, "--server-timeout", "300ms") as it:
            load = Load(it.place)

            async def act() -> None:
                before = await results(load)
                fake.pause()
                await asyncio.sleep(1.0)
                assert load.book.errors["upstream"] > 0
                fake.resume()
                await recovered(load, before, within_s=5)

            check(await during(load, act), it, errors={"upstream"})

    run(test())


def test_paused_for_longer_than_the_callers_wait(fake: Fake) -> None:
    """Flights that may take a minute hold no caller beyond its own deadline."""

    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            load = Load(it.place, deadline_s=0.3)

            async def act() -> None:
                before = await results(load)
                fake.pause()
                await asyncio.sleep(1.0)
                assert load.book.errors["deadline"] > 0
                fake.resume()
                await recovered(load, before, within_s=5)

            check(await during(load, act), it, errors={"deadline", "busy"})

    run(test())


def test_answers_that_come_late_go_to_nobody(fake: Fake) -> None:
    late = replace(fake_model(), delays=Delays(answer_delay_ns=300_000_000))

    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            fake.install(FakeScript((late,)))
            load = Load(it.place, callers=4, deadline_s=0.1)

            async def act() -> None:
                await asyncio.sleep(1.0)
                assert load.book.errors["deadline"] > 0
                assert load.book.results == 0
                fake.install(SCRIPT)
                await recovered(load, 100, within_s=5)

            check(await during(load, act), it, errors={"deadline", "busy"})

    run(test())


def test_slow_answers_are_answers(fake: Fake) -> None:
    slow = replace(fake_model(), delays=Delays(compute_infer_base_ns=200_000_000, return_delay_ns=50_000_000))

    async def test() -> None:
        fake.install(FakeScript((slow,)))
        with Served(fake.address, *POLICY) as it:
            book = await Load(it.place, callers=4).run(requests=100)
            assert book.results == 100
            check(book, it, errors=())

    run(test())


def test_batches_that_overtake_one_another(fake: Fake) -> None:
    """The more rows, the longer: a small batch that was sent last is back first."""
    uneven = replace(fake_model(instances=8), delays=Delays(compute_infer_per_row_ns=4_000_000))

    async def test() -> None:
        fake.install(FakeScript((uneven,)))
        with Served(fake.address, "-k", "16", "-M", "8", "--queue", "256", "--formation-deadline", "0ms") as it:
            book = await Load(it.place, callers=9, depth=5).run(requests=1_000)
            assert book.results == 1_000
            check(book, it, errors=())
        log = [entry for entry in fake.server.log() if entry.last_byte_ns is not None]
        ends = [entry.last_byte_ns for entry in log]
        assert ends != sorted(ends, key=lambda end: end or 0)

    run(test())


ANSWER_FAULTS = {
    "400": Fault(FaultKind.STATUS, probability=0.3, status=400),
    "500": Fault(FaultKind.STATUS, probability=0.3, status=500),
    "503": Fault(FaultKind.STATUS, probability=0.3, status=503),
    **{
        str(kind): Fault(kind, probability=0.3)
        for kind in (
            FaultKind.CLOSE_BEFORE_ANSWER,
            FaultKind.CLOSE_MID_BODY,
            FaultKind.SHORT_BODY,
            FaultKind.LONG_BODY,
            FaultKind.WRONG_SHAPE,
            FaultKind.WRONG_DATATYPE,
            FaultKind.WRONG_ID,
            FaultKind.NEVER_ANSWER,
        )
    },
}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Fake, Served]]:
    """A server and a proxy that outlive each of these faults."""
    with Fake(SCRIPT) as fake, Served(fake.address, *POLICY, "--server-timeout", "200ms") as served:
        yield fake, served
        ended = served.end()
        assert (ended["exit"], ended["open"], served.complaints()) == (0, 0, "")


@pytest.mark.parametrize("name", ANSWER_FAULTS)
def test_an_answer_that_is_none_fails_its_own_batch_alone(shared: tuple[Fake, Served], name: str) -> None:
    fake, served = shared

    async def test() -> None:
        fake.install(replace(SCRIPT, faults=(ANSWER_FAULTS[name],), seed=7))
        book = await Load(served.place).run(requests=600)
        assert book.faults(2 * NS) == []
        assert set(book.errors) == {"upstream"}
        assert book.results > 0
        fake.install(SCRIPT)
        sound = await Load(served.place).run(requests=200)
        # Stray bytes behind an answer cost nobody else's batch: their connection is not used again.
        assert (sound.results, sound.errors.total()) == (200, 0)

    run(test())


OTHER_OUTPUTS = {
    "one more": (FakeTensor("fake_output", "UINT64", (1,)), FakeTensor("more", "UINT64", (1,))),
    "another name": (FakeTensor("y", "UINT64", (1,)),),
    "another size": (FakeTensor("fake_output", "UINT64", (2,)),),
}


@pytest.mark.parametrize("name", OTHER_OUTPUTS)
def test_outputs_that_were_not_announced(shared: tuple[Fake, Served], name: str) -> None:
    fake, served = shared
    other = replace(fake_model(), outputs=OTHER_OUTPUTS[name])

    async def test() -> None:
        fake.install(FakeScript((other,)))
        book = await Load(served.place).run(requests=100)
        assert (book.results, dict(book.errors), book.faults(2 * NS)) == (0, {"upstream": 100}, [])
        fake.install(SCRIPT)
        assert (await Load(served.place).run(requests=100)).results == 100

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        '{"outputs": [OUTPUT]}',
        '{"id": null, "outputs": [OUTPUT]}',
        '{"id": "b", "outputs": [OUTPUT, OUTPUT]}',
        '{"id": "b", "outputs": []}',
        '{"id": "b", "outputs": [{"name": "y", "datatype": "UINT8", "shape": [1e999, 1], "parameters": PARAMETERS}]}',
        '{"id": "b", "outputs": ' + "[" * 100_000,
    ],
    ids=["no id", "empty id", "twice", "none", "infinite", "deep"],
)
def test_an_answer_of_no_form_is_the_servers_fault(answer: str) -> None:
    parameters = '{"binary_data_size": 1}'
    output = f'{{"name": "y", "datatype": "UINT8", "shape": [1, 1], "parameters": {parameters}}}'
    sound, said = '{"id": "b", "outputs": [OUTPUT]}', [("y", b"!")]
    assert [(tensor.name, bytes(tensor.data)) for tensor in decoded(sound.replace("OUTPUT", output))] == said
    with pytest.raises(ServerError, match="the server's answer does not fit the batch"):
        decoded(answer.replace("OUTPUT", output).replace("PARAMETERS", parameters))


def decoded(answer: str) -> tuple[Tensor, ...]:
    """The one result of a batch "b" of one, of a model with one output of one byte, from this answer and a byte."""
    head = answer.encode()
    headers = {"inference-header-content-length": str(len(head))}
    response = HttpResponse(200, headers, memoryview(head + b"!"), ExchangeTimes())
    (result,) = InferMessage(SMALL, 1).decode("b", response)
    return result


def test_a_server_that_is_not_there_at_the_start() -> None:
    begin_s = time.monotonic()
    with Served(f"127.0.0.1:{free_port()}") as it:
        assert it.first == {}
        assert it.wait()["exit"] == 2
        assert "cannot reach the server" in it.complaints()
        assert it.complaints().count("\n") == 1
    assert time.monotonic() - begin_s < 30


def test_a_server_that_takes_no_connection(fake: Fake) -> None:
    """It listens, and the kernel completes the handshakes, but nobody reads: the batches end by their timeout."""

    async def test() -> None:
        with Served(fake.address, *POLICY, "--server-timeout", "300ms") as it:
            fake.kill()
            fake.script = replace(SCRIPT, accept=False)
            await asyncio.to_thread(fake.start)
            load = Load(it.place, callers=4)

            async def act() -> None:
                await asyncio.sleep(2 * STEP_S)
                assert load.book.results == 0
                fake.install(SCRIPT)
                await recovered(load, 100, within_s=5)

            check(await during(load, act), it, errors={"upstream"})

    run(test())
