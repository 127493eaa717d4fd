"""The transports: whose row is whose, what is refused, and what is left behind. Real servers on real sockets."""

from __future__ import annotations

import asyncio
import random
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from b2gmodel.errors import ServerError, SetupError, UsageError
from b2gmodel.live import server as server_module
from b2gmodel.live.fake import FakeModel, FakeScript, FakeServer, FakeTensor, Fault, FaultKind
from b2gmodel.live.http_pool import HttpPool
from b2gmodel.live.infer import Payload
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.repository import embedded_repository
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.shm_transport import ShmTransport
from b2gmodel.live.target import Endpoint
from b2gmodel.live.tensors import Result
from b2gmodel.live.transport import Transport
from b2gmodel.live.transports import TransportName, make_transport
from b2gmodel.live.workloads import FINGERPRINT_BYTES, WorkloadTable, fingerprint, load_workloads

real = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("pytriton") is None, reason="the wheel nvidia-pytriton is not installed"),
]
every_transport = pytest.mark.parametrize("name", list(TransportName))
SHARED_MEMORY = Path("/dev/shm")

TABLE = """
[plain]
input_shape = [3, 64, 64]
datatype = "FP32"
output_shape = [8]
s0_ms = 0.0
s1_ms = 0.0
max_batch = 16
instances = 1
"""

# Three inputs of three types, and as many outputs beside one of strings: each tells which row it was made of.
MIXED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b, c = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "abc")
        words = np.array([[str(row.tolist()).encode(), b"z" * (row[0] & 7)] for row in a.reshape(-1, 3)], np.object_)
        outputs = {"b_out": b, "words": words.reshape(*a.shape[:-1], 2), "a_out": a, "c_out": c + np.uint64(1)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
"""
MIXED_CONFIG = """
backend: "python"
max_batch_size: {max_batch}
input {{ name: "a" data_type: TYPE_INT8 dims: [3] }}
input {{ name: "b" data_type: TYPE_FP16 dims: [2, 5] }}
input {{ name: "c" data_type: TYPE_UINT64 dims: [1] }}
output {{ name: "a_out" data_type: TYPE_INT8 dims: [3] }}
output {{ name: "words" data_type: TYPE_STRING dims: [2] }}
output {{ name: "b_out" data_type: TYPE_FP16 dims: [-1, 5] }}
output {{ name: "c_out" data_type: TYPE_UINT64 dims: [1] }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    path = tmp_path_factory.mktemp("table") / "table.toml"
    path.write_text(TABLE)
    table = load_workloads(path)

    def with_mixed(
        table: WorkloadTable, names: Sequence[str] | None, import_path: Path, *engine: Any
    ) -> dict[str, str]:
        source = f"import sys\n\nsys.path.insert(0, {str(import_path)!r})\n{MIXED}"
        files = dict(embedded_repository(table, names, import_path, *engine))
        for name, max_batch in (("mixed", 8), ("single", 0)):
            files |= {f"{name}/config.pbtxt": MIXED_CONFIG.format(max_batch=max_batch), f"{name}/1/model.py": source}
        return files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "embedded_repository", with_mixed)
        server = EmbeddedServer.start(table)
    with server:
        yield Endpoint(*server.http_address, True, server.table_digest, server.grpc_address[1])


def against(endpoint: Endpoint, model: str, name: str, work: Callable[[Transport, ModelSpec], Awaitable[None]]) -> None:
    """``work`` with a transport to a model, which is closed afterwards."""

    async def main() -> None:
        control = ControlPlane(endpoint.host, endpoint.port)
        spec = await control.model(model, {})
        control.close()
        transport = make_transport(name, endpoint, spec)
        try:
            await transport.warm(2)
            await work(transport, spec)
        finally:
            await transport.aclose()

    asyncio.run(main())


def expected_of_mixed(payload: Payload) -> list[bytes]:
    a, b, c = (bytes(part) for part in payload)
    words = [str(list(struct.unpack("3b", a))).encode(), b"z" * (a[0] & 7)]
    packed = b"".join(struct.pack("<I", len(word)) + word for word in words)
    return [a, packed, b, struct.pack("<Q", struct.unpack("<Q", c)[0] + 1)]


def datas(result: Result) -> list[bytes]:
    return [bytes(tensor.data) for tensor in result]


def distinct(payloads: Sequence[Payload]) -> list[Payload]:
    """The payloads, their bytes replaced by random ones that are finite in every type."""
    for number, payload in enumerate(payloads):
        for part in payload:
            view = memoryview(part)
            view[:] = bytes(byte & 0x3F for byte in random.Random(f"{number} {view.nbytes}").randbytes(view.nbytes))
    return list(payloads)


class TestOnTheRealServer:
    pytestmark = real

    @every_transport
    def test_each_result_belongs_to_its_request(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            payloads = make_payloads(model, 16, transport)
            batches = [payloads[:1], payloads[3:7], payloads, payloads[::-1], payloads[::3]]
            batches += [random.Random(seed).sample(payloads, 8) for seed in range(4)]
            deliveries = await asyncio.gather(*(transport.infer(f"b{i}", batch) for i, batch in enumerate(batches)))
            for batch, delivery in zip(batches, deliveries, strict=True):
                marks = [bytes(result[0].data[:FINGERPRINT_BYTES]) for result in delivery.results]
                assert marks == [fingerprint(memoryview(payload[0])) for payload in batch]

        against(endpoint, "plain", name, work)

    @every_transport
    def test_several_inputs_types_and_outputs(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            payloads = distinct(make_payloads(model, 8, transport))
            for batch in (payloads, payloads[2:5], random.Random(1).sample(payloads, 8), payloads[::2]):
                delivery = await transport.infer("batch", batch)
                assert [datas(result) for result in delivery.results] == list(map(expected_of_mixed, batch))
                for result in delivery.results:
                    assert [tensor.name for tensor in result] == ["a_out", "words", "b_out", "c_out"]
                    assert [tensor.datatype for tensor in result] == ["INT8", "BYTES", "FP16", "UINT64"]
                    assert [tensor.shape for tensor in result] == [(3,), (2,), (2, 5), (1,)]

        against(endpoint, "mixed", name, work)

    @every_transport
    def test_a_model_without_a_batch_dimension(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            (payload,) = distinct(make_payloads(model, 1, transport))
            delivery = await transport.infer("one", [payload])
            assert [datas(result) for result in delivery.results] == [expected_of_mixed(payload)]

        against(endpoint, "single", name, work)

    @every_transport
    def test_payloads_from_any_memory(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            own = distinct(make_payloads(model, 4, transport))
            foreign = [tuple(bytes(part) for part in payload) for payload in own]
            for batch in (foreign, [own[0], foreign[1], own[2]], [own[1], own[1]]):
                delivery = await transport.infer("batch", batch)
                assert [datas(result) for result in delivery.results] == list(map(expected_of_mixed, batch))

        against(endpoint, "mixed", name, work)

    @every_transport
    def test_stamps_are_in_order_and_typed_where_absent(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            times = (await transport.infer("batch", make_payloads(model, 2, transport))).times
            stamps = [times.send_begin_ns, times.send_end_ns, times.first_byte_ns, times.response_end_ns]
            assert [stamp is None for stamp in stamps] == [False, name == "grpc", name == "grpc", False]
            seen = [stamp for stamp in stamps if stamp is not None]
            assert seen == sorted(seen)

        against(endpoint, "plain", name, work)

    @every_transport
    def test_the_servers_words_reach_the_caller(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            payloads = make_payloads(model, 17, transport)
            with pytest.raises(ServerError, match="batch-size must be <= 16"):
                await transport.infer("too many", payloads)
            assert len((await transport.infer("fine", payloads[:16])).results) == 16

        against(endpoint, "plain", name, work)

    @every_transport
    def test_a_payload_of_another_size_is_refused(self, endpoint: Endpoint, name: str) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            (size,) = (tensor.row_bytes for tensor in model.inputs)
            # Together they have the right length: only their border would be wrong.
            with pytest.raises(UsageError, match="does not fit the model's inputs"):
                await transport.infer("torn", [(bytes(size - 4),), (bytes(size + 4),)])

        against(endpoint, "plain", name, work)

    def test_http_and_shm_need_no_tritonclient(self) -> None:
        program = (
            "import sys, b2gmodel.live.transports, b2gmodel.live.shm_transport; print('tritonclient' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"False\n"

    def test_more_grpc_channels(self, endpoint: Endpoint) -> None:
        from b2gmodel.live.grpc_transport import GrpcTransport

        async def work(transport: Transport, model: ModelSpec) -> None:
            assert endpoint.grpc_port is not None
            several = GrpcTransport(endpoint.host, endpoint.grpc_port, model, channels=3)
            payloads = make_payloads(model, 4, several)
            await several.warm(4)
            deliveries = await asyncio.gather(*(several.infer(str(i), payloads) for i in range(6)))
            await several.aclose()
            assert {len(delivery.results) for delivery in deliveries} == {4}

        against(endpoint, "plain", "grpc", work)

    def test_no_grpc_server_is_an_error_of_the_server(self, endpoint: Endpoint) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            lost = make_transport("grpc", replace(endpoint, grpc_port=1), model)
            try:
                with pytest.raises(ServerError, match="UNAVAILABLE"):
                    await lost.infer("lost", make_payloads(model, 1, lost))
            finally:
                await lost.aclose()

        against(endpoint, "plain", "http", work)


class TestSharedMemory:
    pytestmark = real

    def test_what_lies_side_by_side_is_not_copied(self, endpoint: Endpoint) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            assert isinstance(transport, ShmTransport)
            payloads = make_payloads(model, 8, transport)
            for batch in (payloads, payloads[::-1], payloads[2:6], random.Random(3).sample(payloads, 8)):
                await transport.infer("in place", batch)
            assert transport.copied_batches == 0
            await transport.infer("gaps", payloads[::2])
            await transport.infer("one input elsewhere", [(a, bytes(b), c) for a, b, c in payloads])
            assert transport.copied_batches == 2

        against(endpoint, "mixed", "shm", work)

    def test_nothing_is_left_after_close(self, endpoint: Endpoint) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            await transport.infer("batch", make_payloads(model, 8, transport))
            assert len(await regions(endpoint)) == 1
            # The region is in use, and has no name any more: only the owner's empty marker is there.
            assert [path.stat().st_size for path in names()] == [0]

        against(endpoint, "plain", "shm", work)
        assert names() == []
        assert asyncio.run(regions(endpoint)) == []

    def test_the_next_owner_clears_up_after_a_killed_one(self, endpoint: Endpoint) -> None:
        program = textwrap.dedent(f"""
            import asyncio
            from b2gmodel.live.http_pool import HttpPool
            from b2gmodel.live.shared_memory import RegionOwner

            async def main():
                owner = RegionOwner(HttpPool({endpoint.host!r}, {endpoint.port}))
                region = owner.allocate(1 << 20)
                await owner.register()
                print(region.name, flush=True)
                await asyncio.Event().wait()

            asyncio.run(main())
        """)
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            name = process.stdout.readline().decode().strip()

            async def beside_a_living_owner(transport: Transport, model: ModelSpec) -> None:
                await transport.infer("batch", make_payloads(model, 2, transport))
                assert name in await regions(endpoint)

            against(endpoint, "plain", "shm", beside_a_living_owner)
            process.send_signal(signal.SIGKILL)
        assert [path.stat().st_size for path in names()] == [0]
        assert asyncio.run(regions(endpoint)) == [name]
        # As if another had been killed while the server was about to map its memory.
        (SHARED_MEMORY / "b2g-proxy-0123456789ab-0").touch()

        async def after_its_death(transport: Transport, model: ModelSpec) -> None:
            await transport.infer("batch", make_payloads(model, 2, transport))
            assert name not in await regions(endpoint)

        against(endpoint, "plain", "shm", after_its_death)
        assert names() == []

    def test_more_memory_than_there_is(self, endpoint: Endpoint) -> None:
        async def work(transport: Transport, model: ModelSpec) -> None:
            with pytest.raises(SetupError, match="cannot take shared memory"):
                transport.payload_memory(1 << 50)

        against(endpoint, "plain", "shm", work)
        assert names() == []


def names() -> list[Path]:
    return sorted(SHARED_MEMORY.glob("b2g-proxy-*"))


async def regions(endpoint: Endpoint) -> list[str]:
    pool = HttpPool(endpoint.host, endpoint.port)
    try:
        return [entry["name"] for entry in (await pool.request("GET", "/v2/systemsharedmemory/status")).json()]
    finally:
        pool.close()


FAKE = FakeModel(
    "m",
    inputs=(FakeTensor("x", "UINT64", (2,)), FakeTensor("y", "INT16", (3,)), FakeTensor("z", "BOOL", (5,))),
    outputs=(FakeTensor("mark", "UINT64", (1,)), FakeTensor("text", "BYTES", (2,)), FakeTensor("wide", "FP64", (3, 2))),
)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer.start(FakeScript((FAKE,))) as server:
        yield server


def endpoint_of(fake: FakeServer) -> Endpoint:
    host, port = fake.address.split(":")
    return Endpoint(host, int(port), False, None)


class TestOnTheFakeServer:
    def test_several_inputs_and_outputs(self, fake: FakeServer) -> None:
        fake.install(FakeScript((FAKE,)))

        async def work(transport: Transport, model: ModelSpec) -> None:
            payloads = distinct(make_payloads(model, 8, transport))
            delivery = await transport.infer("batch", payloads)
            for payload, (mark, text, wide) in zip(payloads, delivery.results, strict=True):
                first = bytes(payload[0])[:8]
                assert bytes(mark.data) == first
                assert bytes(text.data) == 2 * (struct.pack("<I", 8) + first)
                assert bytes(wide.data) == first.ljust(48, b"\0")

        against(endpoint_of(fake), "m", "http", work)

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            (FaultKind.WRONG_DATATYPE, "output mark is INT64, declared UINT64"),
            (FaultKind.WRONG_SHAPE, "output mark has shape"),
            (FaultKind.WRONG_ID, "came for batch"),
            (FaultKind.STATUS, "HTTP 500"),
            (FaultKind.CLOSE_BEFORE_ANSWER, "closed the connection before it answered"),
            (FaultKind.CLOSE_MID_BODY, "the server closed after"),
        ],
    )
    def test_a_faulty_answer_is_refused_and_the_next_one_is_sound(
        self, fake: FakeServer, kind: FaultKind, words: str
    ) -> None:
        fake.install(FakeScript((FAKE,), faults=(Fault(kind, at=(1,)),)))

        async def work(transport: Transport, model: ModelSpec) -> None:
            payloads = make_payloads(model, 3, transport)
            with pytest.raises(ServerError, match=words):
                await transport.infer("faulty", payloads)
            assert len((await transport.infer("sound", payloads)).results) == 3

        against(endpoint_of(fake), "m", "http", work)

    def test_a_server_without_shared_memory_is_named_as_such(self, fake: FakeServer) -> None:
        fake.install(FakeScript((FAKE,)))

        async def work(transport: Transport, model: ModelSpec) -> None:
            with pytest.raises(ServerError, match=r"does not take our shared memory.*use --transport http"):
                await transport.infer("batch", make_payloads(model, 2, transport))

        against(endpoint_of(fake), "m", "shm", work)
        assert names() == []
