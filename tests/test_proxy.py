"""The proxy on real sockets, before a transport that the test holds: every request ends once, every slot returns."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace

import pytest
from proxy_rig import MODEL, HeldTransport, rig, run

from b2gmodel.batcher import Policy
from b2gmodel.errors import SetupError, UsageError
from b2gmodel.live.kserve import TensorSpec
from b2gmodel.live.observer import Outcome
from b2gmodel.live.proxy import Proxy
from b2gmodel.live.wire import Datatype, ErrorCode, Request, encode
from b2gmodel.live.wire import TensorSpec as WireSpec

SECOND_NS = 10**9


def test_requests_of_several_clients_travel_in_one_batch_and_come_back_apart() -> None:
    async def test() -> None:
        async with rig(k=3) as it, await it.client() as a, await it.client() as b:
            a.ask(1, 10, 11)
            a.ask(2, 20, 21)
            await it.until("queue_depth", 2)
            b.ask(1, 30, 31)
            batch = await it.batch()
            assert batch.rows == [struct.pack("<2i", *row) for row in ((10, 11), (20, 21), (30, 31))]
            batch.succeed()
            assert [await a.answer(), await a.answer(), await b.answer()] == [
                (1, (10, 11)),
                (2, (20, 21)),
                (1, (30, 31)),
            ]
            assert it.seen.requests == [(Outcome.ANSWERED, 8, 8)] * 3
            await it.until("flights", 1)
            assert [flight.size for flight in it.seen.flights] == [3]
            assert it.proxy.snapshot().batch_sizes == {3: 1}

    run(test())


def test_payloads_lie_side_by_side_in_the_transports_memory() -> None:
    async def test() -> None:
        async with rig(k=4) as it, await it.client() as client:
            for request_id in range(1, 5):
                client.ask(request_id, request_id, 0)
            batch = await it.batch()
            region = it.proxy.pool.memory
            batch.payloads[0][0][:4] = struct.pack("<i", 77)  # type: ignore[index]
            assert struct.unpack_from("<8i", region) == (77, 0, 2, 0, 3, 0, 4, 0)
            batch.succeed()
            for _ in range(4):
                await client.answer()

    run(test())


def test_inputs_in_another_order_are_put_into_the_models() -> None:
    two = Request(1, "m", None, (WireSpec("b", Datatype.UINT8, (3,), 3), WireSpec("a", Datatype.INT32, (1,), 4)))
    model = replace(MODEL, inputs=(TensorSpec("a", "INT32", (1,)), TensorSpec("b", "UINT8", (3,))))

    async def test() -> None:
        async with rig(model=model) as it, await it.client() as client:
            client.send(two, [b"xyz", struct.pack("<i", 5)])
            batch = await it.batch()
            assert [bytes(part) for part in batch.payloads[0]] == [struct.pack("<i", 5), b"xyz"]

    run(test())


@pytest.mark.parametrize(
    ("model", "spec", "payload"),
    [
        ("other", WireSpec("x", Datatype.INT32, (2,), 8), bytes(8)),
        ("m", WireSpec("x", Datatype.INT32, (1, 2), 8), bytes(8)),
        ("m", WireSpec("x", Datatype.FP32, (2,), 8), bytes(8)),
        ("m", WireSpec("z", Datatype.INT32, (2,), 8), bytes(8)),
        ("m", WireSpec("x", Datatype.INT32, (3,), 12), bytes(12)),
    ],
)
def test_what_the_model_does_not_take_is_refused_and_the_connection_goes_on(
    model: str, spec: WireSpec, payload: bytes
) -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.send(Request(1, model, None, (spec,)), [payload])
            client.ask(2)
            assert await client.answer() == (1, ErrorCode.REFUSED)
            (await it.batch()).succeed()
            assert await client.answer() == (2, (2, 0))

    run(test())


def test_busy_when_no_slot_is_left_and_served_again_when_there_is() -> None:
    async def test() -> None:
        async with rig(queue=1, client_requests=4) as it, await it.client() as client, await it.client() as late:
            client.ask(1)
            client.ask(2)
            await it.until("slots_in_use", 2)
            late.ask(3)
            late.ask(4)
            assert await late.answer() == (3, ErrorCode.BUSY)
            assert await late.answer() == (4, ErrorCode.BUSY)
            (await it.batch()).succeed()
            assert await client.answer() == (1, (1, 0))
            late.ask(5)
            (await it.batch()).succeed()
            assert await client.answer() == (2, (2, 0))
            (await it.batch()).succeed()
            assert await late.answer() == (5, (5, 0))
            assert it.count(Outcome.BUSY) == 2
            assert it.proxy.snapshot().rejected == 2

    run(test())


def test_busy_comes_before_the_payload_is_there() -> None:
    async def test() -> None:
        async with rig(queue=1, client_requests=4) as it, await it.client() as client, await it.client() as late:
            client.ask(1)
            client.ask(2)
            await it.until("slots_in_use", 2)
            whole = _frame_of(9)
            late.writer.write(whole[:-3])
            assert await late.answer() == (9, ErrorCode.BUSY)
            late.writer.write(whole[-3:])
            for _ in range(2):
                (await it.batch()).succeed()
                await client.answer()
            late.ask(10)
            (await it.batch()).succeed()
            assert await late.answer() == (10, (10, 0))

    run(test())


def test_a_client_with_its_budget_in_use_is_not_read_any_further() -> None:
    async def test() -> None:
        async with rig(queue=100, client_requests=2) as it, await it.client() as client, await it.client() as other:
            for request_id in range(1, 7):
                client.ask(request_id)
            await it.until("slots_in_use", 2)
            other.ask(1)  # by the time that this one is there, all of the first client's would have been
            await it.until("slots_in_use", 3)
            assert it.proxy.snapshot().received == 3
            answers = []
            for _ in range(7):
                (await it.batch()).succeed()
            for _ in range(6):
                answers.append(await client.answer())
            assert answers == [(n, (n, 0)) for n in range(1, 7)]
            assert await other.answer() == (1, (1, 0))

    run(test())


def test_deadline_of_a_waiting_request() -> None:
    async def test() -> None:
        async with rig(k=2) as it, await it.client() as client:
            client.ask(1, deadline_ns=1_000_000)
            assert await client.answer() == (1, ErrorCode.DEADLINE)
            assert it.proxy.snapshot().slots_in_use == 0

    run(test())


def test_deadline_in_flight_is_told_at_once_and_the_slot_stays_until_the_flight_ends() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.ask(1, deadline_ns=20_000_000)
            batch = await it.batch()
            assert await client.answer() == (1, ErrorCode.DEADLINE)
            assert (it.proxy.snapshot().open, it.proxy.snapshot().slots_in_use) == (0, 1)
            batch.succeed()
            await it.until("slots_in_use", 0)
            assert it.count(Outcome.DEADLINE) == 1

    run(test())


def test_deadline_while_the_payload_is_received() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            whole = _frame_of(1, deadline_ns=1_000_000)
            client.writer.write(whole[:-3])
            assert await client.answer() == (1, ErrorCode.DEADLINE)
            client.writer.write(whole[-3:])
            client.ask(2)
            (await it.batch()).succeed()
            assert await client.answer() == (2, (2, 0))

    run(test())


def test_a_met_deadline_leaves_no_trace() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.ask(1, deadline_ns=20 * SECOND_NS)
            (await it.batch()).succeed()
            assert await client.answer() == (1, (1, 0))

    run(test())


def test_cancel_of_a_waiting_request_and_of_one_in_flight() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.ask(1)
            client.ask(2)
            client.ask(3)
            batch = await it.batch()
            client.withdraw(1)
            client.withdraw(2)
            client.withdraw(99)  # open nowhere: ignored
            assert [await client.answer(), await client.answer()] == [
                (1, ErrorCode.CANCELLED),
                (2, ErrorCode.CANCELLED),
            ]
            assert it.proxy.snapshot().slots_in_use == 2  # 1 still flies, 3 waits
            batch.succeed()
            last = await it.batch()
            assert last.rows == [struct.pack("<2i", 3, 0)]
            last.succeed()
            assert await client.answer() == (3, (3, 0))

    run(test())


def test_a_client_that_leaves_withdraws_what_it_had_open() -> None:
    async def test() -> None:
        async with rig(client_requests=8) as it:
            async with await it.client() as client:
                for request_id in (1, 2, 3):
                    client.ask(request_id)
                client.writer.write(_frame_of(4)[:-1])
                batch = await it.batch()
                await it.until("slots_in_use", 4)
                client.writer.transport.abort()
            await it.until("connections", 0)
            assert it.proxy.snapshot().slots_in_use == 1  # the flight's
            batch.succeed()
            await it.until("slots_in_use", 0)
            assert it.count(Outcome.DISCONNECTED) == 4
            assert it.transport.batches.empty()

    run(test())


def test_an_id_in_use_ends_the_connection_and_all_that_is_open() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client, await it.client() as other:
            client.ask(1)
            client.ask(2)
            client.ask(1)
            batch = await it.batch()
            assert await client.answer() == (None, ErrorCode.MALFORMED)
            assert await client.ended()
            other.ask(1)
            batch.succeed()
            (await it.batch()).succeed()
            assert await other.answer() == (1, (1, 0))
            assert it.count(Outcome.MALFORMED) == 2
            assert it.proxy.snapshot().protocol_errors == 1

    run(test())


def test_rubbish_is_told_so_although_more_of_it_follows() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(1_000_000))
            assert await client.answer() == (None, ErrorCode.MALFORMED)
            assert await client.ended()
            assert it.proxy.snapshot().received == 0

    run(test())


def test_a_malformed_head_names_its_request_and_ends_the_others() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.ask(1)
            await it.batch()
            bad = bytearray(_frame_of(2))
            bad[38] = 1  # reserved
            client.writer.write(bad)
            assert await client.answer() == (2, ErrorCode.MALFORMED)
            assert await client.answer() == (None, ErrorCode.MALFORMED)
            assert await client.ended()

    run(test())


def test_end_of_input_within_a_frame() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.writer.write(_frame_of(1)[:-1])
            client.writer.write_eof()
            assert await client.answer() == (None, ErrorCode.MALFORMED)
            assert await client.ended()
            assert it.count(Outcome.DISCONNECTED) == 1

    run(test())


def test_a_failed_flight_fails_its_requests_alone() -> None:
    async def test() -> None:
        async with rig(k=2) as it, await it.client() as client:
            for request_id in (1, 2, 3, 4):
                client.ask(request_id)
            (await it.batch()).fail()
            (await it.batch()).succeed()
            assert [await client.answer() for _ in range(4)] == [
                (1, ErrorCode.UPSTREAM),
                (2, ErrorCode.UPSTREAM),
                (3, (3, 0)),
                (4, (4, 0)),
            ]
            await it.until("flights", 2)
            assert it.proxy.snapshot().flights_failed == 1

    run(test())


def test_a_server_that_never_answers_costs_its_flight_only() -> None:
    async def test() -> None:
        async with rig(flight_timeout_s=0.02) as it, await it.client() as client:
            client.ask(1)
            assert await client.answer() == (1, ErrorCode.UPSTREAM)
            await it.batch()
            client.ask(2)
            (await it.batch()).succeed()
            assert await client.answer() == (2, (2, 0))

    run(test())


def test_drain_finishes_what_waits_and_flies_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with rig(k=2) as it, await it.client() as client, await it.client() as idle:
            for request_id in (1, 2, 3):
                client.ask(request_id)
            await it.until("queue_depth", 1)
            draining = asyncio.create_task(it.proxy.drain(30))
            await asyncio.sleep(0)
            client.ask(4)
            assert await client.answer() == (4, ErrorCode.DRAINING)
            with pytest.raises(OSError):  # noqa: PT011 - refused or reset, by how far the closing has come
                await (await it.client()).frame()
            (await it.batch()).succeed()
            last = await it.batch()
            assert last.rows == [struct.pack("<2i", 3, 0)]
            last.succeed()
            assert [await client.answer() for _ in range(4)] == [
                (1, (1, 0)),
                (2, (2, 0)),
                (3, (3, 0)),
                (None, ErrorCode.DRAINING),
            ]
            assert await client.ended()
            assert await idle.answer() == (None, ErrorCode.DRAINING)
            client.writer.close()
            idle.writer.close()
            assert await draining

    run(test())


def test_drain_breaks_off_what_does_not_end() -> None:
    async def test() -> None:
        async with rig() as it, await it.client() as client:
            client.ask(1)
            client.ask(2)
            await it.until("slots_in_use", 2)
            draining = asyncio.create_task(it.proxy.drain(0.01))
            assert [await client.answer(), await client.answer()] == [
                (1, ErrorCode.INTERNAL),
                (2, ErrorCode.INTERNAL),
            ]
            client.writer.close()
            assert not await draining

    run(test())


def test_one_client_too_many_is_told_so() -> None:
    async def test() -> None:
        async with rig(connections=1) as it, await it.client() as first:
            first.ask(1)
            batch = await it.batch()
            async with await it.client() as second:
                second.ask(1)
                assert await second.answer() == (None, ErrorCode.BUSY)
                assert await second.ended()
            batch.succeed()
            assert await first.answer() == (1, (1, 0))

    run(test())


def test_a_frame_that_does_not_get_whole_is_given_up() -> None:
    async def test() -> None:
        async with rig(frame_timeout_s=100) as it, await it.client() as slow, await it.client() as idle:
            slow.writer.write(_frame_of(1)[:-1])
            idle.ask(1)
            batch = await it.batch()
            await it.until("slots_in_use", 2)
            now_s = asyncio.get_running_loop().time()
            it.proxy._sweep(now_s)
            it.proxy._sweep(now_s + 99)
            assert it.proxy.snapshot().protocol_errors == 0
            it.proxy._sweep(now_s + 100)
            assert await slow.answer() == (None, ErrorCode.MALFORMED)
            assert await slow.ended()
            batch.succeed()
            assert await idle.answer() == (1, (1, 0))

    run(test())


def test_a_silent_client_is_let_go_and_one_that_waits_is_not() -> None:
    async def test() -> None:
        async with rig(idle_timeout_s=100) as it, await it.client() as silent, await it.client() as waiting:
            waiting.ask(1)
            batch = await it.batch()
            await it.until("connections", 2)
            it.proxy._sweep(asyncio.get_running_loop().time() + 101)
            assert await silent.answer() == (None, ErrorCode.DEADLINE)
            batch.succeed()
            assert await waiting.answer() == (1, (1, 0))

    run(test())


def test_clients_that_do_not_read_are_cut_off_at_the_bound() -> None:
    async def test() -> None:
        async with rig(unsent_bytes=2**20) as it, await it.client() as good:
            lazy = socket.create_connection(it.address)
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for number in range(1, 9):
                lazy.sendall(_frame_of(number))
            for _ in range(8):
                (await it.batch()).succeed(pad_bytes=2**20)
                if it.proxy.snapshot().shed_connections:
                    break
            await it.until("shed_connections", 1)
            await it.until("connections", 1)
            assert it.proxy.snapshot().unsent_bytes == 0
            lazy.close()
            while it.proxy.snapshot().slots_in_use:
                if not it.transport.batches.empty():
                    (await it.batch()).succeed()
                await asyncio.sleep(0)
            good.ask(1)
            (await it.batch()).succeed()
            assert await good.answer() == (1, (1, 0))

    run(test())


def test_a_public_address_needs_consent() -> None:
    async def test() -> None:
        async with rig() as it:
            for host in ("0.0.0.0", "::", "192.0.2.1"):
                with pytest.raises(UsageError, match="can be reached from outside"):
                    await it.proxy.start(host, 0)
            with pytest.raises(SetupError, match="cannot listen"):
                await it.proxy.start("127.0.0.1", it.address[1])

    run(test())


def test_a_batch_beyond_the_models() -> None:
    with pytest.raises(UsageError, match="batches of this size: saw 9; allowed: 1 to 8"):
        Proxy(MODEL, Policy(9, 1, 9), HeldTransport(), run_id="t")


def test_the_bound_on_memory_is_the_sum_of_its_parts() -> None:
    async def test() -> None:
        async with rig(k=2, flights=3, queue=10, connections=100, unsent_bytes=1000) as it:
            bound = it.proxy.memory_bound
            assert bound.payloads == (10 + 2 * 3) * 8 == it.proxy.pool.memory.nbytes
            assert bound.answers == 2 * 1000
            assert bound.total == bound.payloads + bound.frames + bound.answers

    run(test())


def _frame_of(request_id: int, deadline_ns: int | None = None) -> bytes:
    """A whole request for ``MODEL`` as bytes."""
    spec = WireSpec("x", Datatype.INT32, (2,), 8)
    return b"".join(
        bytes(part)
        for part in encode(Request(request_id, "m", deadline_ns, (spec,)), [struct.pack("<2i", request_id, 0)])
    )
