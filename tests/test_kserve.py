"""What a server says of itself: read right where it is right, and refused in one clear line where it is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_bench import MODEL, OPEN, SCRIPT, renew, run

from b2gmodel.errors import B2GError, ServerError, UsageError
from b2gmodel.flights import ExchangeTimes
from b2gmodel.live.fake import FakeScript, FakeServer, FakeTensor
from b2gmodel.live.http import HttpResponse
from b2gmodel.live.infer import InferMessage
from b2gmodel.live.kserve import BatchCounters, ControlPlane, ModelCounters, ModelSpec
from b2gmodel.live.tensors import TensorSpec


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


def plane(server: FakeServer, **options: Any) -> ControlPlane:
    host, port = server.address.split(":")
    return ControlPlane(host, int(port), **options)


def model(server: FakeServer, name: str = "m", **shapes: tuple[int, ...]) -> ModelSpec:
    async def main() -> ModelSpec:
        control = plane(server)
        try:
            return await control.model(name, shapes)
        finally:
            control.close()

    return run(main())


def answer(status: int = 200, body: object = None) -> HttpResponse:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpResponse(status, {}, memoryview(content), ExchangeTimes())


class Said(ControlPlane):
    """A control plane whose server says what the test wants."""

    def __init__(self, **answers: HttpResponse) -> None:
        super().__init__("127.0.0.1", 1)
        self._answers = answers

    async def _ask(self, method: str, target: str, body: bytes = b"") -> HttpResponse:
        return self._answers[target.rsplit("/", 1)[1]]


METADATA = {
    "versions": ["3"],
    "platform": "onnx",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": ["-1", 4, 3]}],
    "outputs": [{"name": "y", "datatype": "BYTES", "shape": [-1, 1]}],
}
CONFIG: dict[str, Any] = {"max_batch_size": 8}


def described(metadata: object = METADATA, config: object = CONFIG) -> ModelSpec:
    said = Said(m=answer(body=metadata), config=answer(body=config))
    return run(said.model("m", {}))


class TestModels:
    def test_as_the_server_describes_it(self, server: FakeServer) -> None:
        spec = model(server)
        assert (spec.name, spec.version, spec.max_batch_size, spec.instances) == ("m", "1", 8, 1)
        assert (spec.dynamic_batching, spec.compute) == (False, "fake")
        assert spec.inputs == (TensorSpec("x", "FP32", (4, 3)),)
        assert spec.outputs == (TensorSpec("fake_output", "UINT64", (1,)),)
        assert spec.payload_bytes == 48
        assert spec.batch_shape(spec.inputs[0], 5) == [5, 4, 3]

    def test_dynamic_batching_is_seen(self, server: FakeServer) -> None:
        renew(server, FakeScript((replace(MODEL, dynamic_batching=True, instances=3),)))
        assert (model(server).dynamic_batching, model(server).instances) == (True, 3)

    def test_without_a_batch_dimension(self, server: FakeServer) -> None:
        spec = model(server, "unbatched")
        assert (spec.max_batch_size, spec.inputs[0].shape) == (0, (4, 3))
        assert spec.batch_shape(spec.inputs[0], 1) == [4, 3]

    def test_open_dimensions_are_filled_in(self, server: FakeServer) -> None:
        assert [tensor.shape for tensor in model(server, "open", x=(4, 5), mask=(7,)).inputs] == [(4, 5), (7,)]

    @pytest.mark.parametrize(
        ("shapes", "missing"),
        [({}, "--shape x:4,?, --shape mask:?"), ({"x": (4, 5)}, "--shape mask:?"), ({"mask": (7,)}, "--shape x:4,?")],
    )
    def test_open_dimensions_are_listed(self, server: FakeServer, shapes: Any, missing: str) -> None:
        with pytest.raises(UsageError, match="the model has inputs of dynamic shape") as seen:
            model(server, "open", **shapes)
        assert seen.value.observed == missing

    @pytest.mark.parametrize("shape", [(5, 3), (4,), (4, 3, 1), (8, 4, 3)])
    def test_a_shape_that_contradicts_the_model(self, server: FakeServer, shape: tuple[int, ...]) -> None:
        with pytest.raises(UsageError, match="--shape: the shape does not fit the model's input") as seen:
            model(server, "m", x=shape)
        assert seen.value.allowed == "x:4,3"

    def test_a_shape_for_no_input(self, server: FakeServer) -> None:
        with pytest.raises(UsageError, match="the model has no such input: saw 'images'; allowed: x"):
            model(server, "m", images=(1,))

    @pytest.mark.parametrize("name", ["resnet", "", "m/config", "../m", "m%2Fx"])
    def test_a_name_that_it_does_not_serve(self, server: FakeServer, name: str) -> None:
        with pytest.raises(UsageError) as seen:
            model(server, name)
        assert seen.value.problem == "the server does not serve this model"
        assert seen.value.hint == "it serves: an odd/../name, m, open, unbatched"

    def test_a_name_with_a_slash_is_one_name(self, server: FakeServer) -> None:
        assert model(server, "an odd/../name").name == "an odd/../name"

    def test_a_server_without_an_index(self) -> None:
        for index in (answer(404), answer(body=7), answer(body=b"<html>"), answer(body=[{}])):
            said = Said(m=answer(404, {"error": "no"}), index=index)
            with pytest.raises(UsageError, match=r"saw 'm \(no\)'; check the name with the server's operator"):
                run(said.model("m", {}))

    @pytest.mark.parametrize(
        "metadata",
        [[], 7, None, {}, {"inputs": []}, {"inputs": 7}, {"inputs": [{}]}, {"inputs": [{"name": "x", "shape": "a"}]}]
        + [METADATA | {"versions": 7}, METADATA | {"outputs": [{"name": "y"}]}],
    )
    def test_a_description_of_another_form(self, metadata: object) -> None:
        with pytest.raises(ServerError):
            described(metadata)

    @pytest.mark.parametrize(
        "config",
        [[], 7, {"max_batch_size": "x"}, CONFIG | {"instance_group": [7]}, CONFIG | {"parameters": [1]}],
    )
    def test_a_configuration_of_another_form(self, config: object) -> None:
        with pytest.raises(ServerError, match="does not have the form"):
            described(config=config)

    def test_the_description_itself_is_sound(self) -> None:
        spec = described(config=CONFIG | {"instance_group": [{"count": 2, "gpus": [0, 1]}, {"count": 3}]})
        assert (spec.version, spec.platform, spec.instances) == ("3", "onnx", 7)
        assert spec.outputs == (TensorSpec("y", "BYTES", (1,)),)

    def test_what_the_configuration_does_not_say_is_none(self) -> None:
        fixed = METADATA | {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 3]}]}
        said = Said(m=answer(body=fixed), config=answer(404))
        spec = run(said.model("m", {}))
        assert (spec.instances, spec.dynamic_batching, spec.max_batch_size) == (None, None, 0)


class TestServers:
    def test_metadata(self, server: FakeServer) -> None:
        control = plane(server)
        assert run(control.server_metadata())["version"] == "2.51.0"
        control.close()

    @pytest.mark.parametrize(
        ("said", "kind", "problem"),
        [
            (answer(404), UsageError, "this address answers, but not as a KServe v2 server"),
            (answer(body=b"<html>"), ServerError, "the server's answer is not JSON"),
            (answer(body=[]), ServerError, "the server's metadata is no object"),
        ],
    )
    def test_that_are_none(self, said: HttpResponse, kind: type[B2GError], problem: str) -> None:
        with pytest.raises(kind) as seen:
            run(Said(v2=said).server_metadata())
        assert seen.value.problem == problem

    def test_that_never_answer(self, server: FakeServer) -> None:
        server.install(replace(SCRIPT, accept=False))
        control = plane(server, timeout_s=0.05)
        with pytest.raises(ServerError, match="the server does not answer: saw 'GET /v2'; allowed: 0.05 s"):
            run(control.server_metadata())


def counters(**row: Any) -> dict[str, Any]:
    batch = {"batch_size": 8} | {
        name: {"count": 1, "ns": 5} for name in ("compute_input", "compute_infer", "compute_output")
    }
    return {
        "execution_count": "1",
        "inference_count": 8,
        "inference_stats": {"queue": {"ns": 3}},
        "batch_stats": [batch | row],
    }


class TestCounters:
    def test_whole(self) -> None:
        seen = run(Said(stats=answer(body={"model_stats": [counters()]})).counters("m"))
        assert seen == ModelCounters(1, 8, 3, {8: BatchCounters(1, 5, 5, 5)})
        assert seen.of(8).service_ns == 15
        assert seen.of(4) == BatchCounters(0, 0, 0, 0)

    @pytest.mark.parametrize(
        "document",
        [[], {}, {"model_stats": []}, {"model_stats": 7}, {"model_stats": [{}]}, {"model_stats": [7]}]
        + [{"model_stats": [counters(compute_infer=7)]}, {"model_stats": [counters(batch_size="x")]}],
    )
    def test_of_another_form(self, document: object) -> None:
        with pytest.raises(ServerError, match="do not have the form of the KServe v2 statistics extension"):
            run(Said(stats=answer(body=document)).counters("m"))

    def test_a_server_that_keeps_none(self) -> None:
        with pytest.raises(ServerError, match="gives no statistics for this model: saw 'HTTP 404 no'"):
            run(Said(stats=answer(404, {"error": "no"})).counters("m"))

    def test_the_difference(self) -> None:
        assert BatchCounters(3, 30, 31, 32).since(BatchCounters(1, 10, 10, 10)) == BatchCounters(2, 20, 21, 22)

    @pytest.mark.parametrize("field", range(4))
    def test_one_that_runs_backwards(self, field: int) -> None:
        before = [1, 1, 1, 1]
        before[field] = 3
        with pytest.raises(ServerError, match="the server's counters ran backwards: saw -1"):
            BatchCounters(2, 2, 2, 2).since(BatchCounters(*before))

    def test_booking_is_waited_for_but_not_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("b2gmodel.live.kserve._BOOKING_TIMEOUT_S", 0.01)
        said = Said(stats=answer(body={"model_stats": [counters()]}))
        assert run(said.booked_counters("m", 1)).executions == 1
        with pytest.raises(
            ServerError, match="did not book our batches .*: saw '1 executions'; allowed: 2 within 0.01 s"
        ):
            run(said.booked_counters("m", 2))

    def test_a_total_ahead_of_its_batch_sizes_is_not_booked_yet(self) -> None:
        seen = ModelCounters(2, 16, 3, {8: BatchCounters(1, 5, 5, 5)})
        assert (seen.booked_executions, seen.booked_requests) == (1, 8)


TWO = ModelSpec(
    name="a/b",
    version="1",
    platform="p",
    max_batch_size=8,
    instances=1,
    dynamic_batching=False,
    inputs=(TensorSpec("x", "UINT8", (3,)), TensorSpec("m", "BOOL", (1,))),
    outputs=(TensorSpec("y", "UINT8", (2,)),),
    compute="real",
    parameters={},
)
PAYLOADS = [(b"abc", b"\x01"), (b"def", b"\x00")]
OUTPUT = {"name": "y", "datatype": "UINT8", "shape": [2, 2], "parameters": {"binary_data_size": 4}}


def reply(document: object, tail: bytes = b"1234", length: int | None = None) -> HttpResponse:
    head = json.dumps(document).encode()
    headers = {"inference-header-content-length": str(len(head) if length is None else length)}
    return HttpResponse(200, headers, memoryview(head + tail), ExchangeTimes())


@pytest.mark.parametrize(("known", "kind"), [(False, UsageError), (True, ServerError)])
def test_a_server_that_was_never_there_is_usage_and_one_that_is_gone_has_failed(known: bool, kind: type) -> None:
    control = ControlPlane("127.0.0.1", 1, known=known)
    with pytest.raises(kind, match="cannot reach the server"):
        asyncio.run(control.server_metadata())
    control.close()


class TestInferMessage:
    def test_the_request_byte_by_byte(self) -> None:
        headers, body = InferMessage(TWO, 2).encode("id-1", PAYLOADS)
        head = (
            b'{"id":"id-1","inputs":['
            b'{"name":"x","shape":[2,3],"datatype":"UINT8","parameters":{"binary_data_size":6}},'
            b'{"name":"m","shape":[2,1],"datatype":"BOOL","parameters":{"binary_data_size":2}}],'
            b'"parameters":{"binary_data_output":true}}'
        )
        assert InferMessage(TWO, 2).target == "/v2/models/a%2Fb/infer"
        assert [bytes(piece) for piece in body] == [head, b"abc", b"def", b"\x01", b"\x00"]
        assert dict(headers)["Inference-Header-Content-Length"] == str(len(head))
        # The payloads are the callers' own buffers, not copies.
        assert body[1] is PAYLOADS[0][0]

    def test_the_answer_row_by_row(self) -> None:
        rows = InferMessage(TWO, 2).decode("id-1", reply({"id": "id-1", "outputs": [OUTPUT]}))
        assert [(tensor.name, tensor.shape, bytes(tensor.data)) for (tensor,) in rows] == [
            ("y", (2,), b"12"),
            ("y", (2,), b"34"),
        ]

    @pytest.mark.parametrize(
        "payloads",
        [[(b"ab", b"\x01"), (b"defg", b"\x00")], [(b"abc",), (b"def",)], [(b"abc", b"\x01", b""), (b"def", b"\x00")]],
    )
    def test_a_payload_of_another_size_is_never_sent(self, payloads: Any) -> None:
        with pytest.raises(UsageError, match="the payload does not fit the model's inputs"):
            InferMessage(TWO, 2).encode("id-1", payloads)

    @pytest.mark.parametrize(
        "bad",
        [
            reply({"id": "id-2", "outputs": [OUTPUT]}),
            reply({"id": "id-1", "outputs": [OUTPUT]}, b"12345"),
            reply({"id": "id-1", "outputs": [OUTPUT]}, b"123"),
            reply({"id": "id-1", "outputs": []}, b""),
            reply({"id": "id-1"}),
            reply([]),
            reply({"id": "id-1", "outputs": [OUTPUT, OUTPUT]}, b"12341234"),
            reply({"id": "id-1", "outputs": [OUTPUT | {"name": "z"}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"datatype": "INT8"}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"shape": [1, 4]}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"shape": [4]}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"shape": [-2, -2]}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"parameters": {"binary_data_size": -4}}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"parameters": {}}]}),
            reply({"id": "id-1", "outputs": [OUTPUT | {"data": [1, 2, 3, 4]}]}),
            reply({"id": "id-1", "outputs": [OUTPUT]}, length=10_000),
            reply({"id": "id-1", "outputs": [OUTPUT]}, length=-1),
            reply({"id": "id-1", "outputs": [OUTPUT]}, length=5),
        ],
    )
    def test_an_answer_that_does_not_fit_is_never_passed_on(self, bad: HttpResponse) -> None:
        with pytest.raises(ServerError, match="does not fit the batch"):
            InferMessage(TWO, 2).decode("id-1", bad)

    def test_a_model_that_answered_nothing_has_a_hint_of_its_own(self) -> None:
        empty = OUTPUT | {"parameters": {"binary_data_size": 0}}
        with pytest.raises(ServerError, match="has 0 bytes, not 2 rows of .*; the model answered nothing: .* numpy<2"):
            InferMessage(TWO, 2).decode("id-1", reply({"id": "id-1", "outputs": [empty]}, b""))

    def test_a_refusal_is_in_the_servers_words(self) -> None:
        with pytest.raises(ServerError, match="the server refused the batch: saw 'HTTP 400 too large'"):
            InferMessage(TWO, 2).decode("id-1", answer(400, {"error": "too large"}))


def test_open_dimensions_of_the_fake_are_as_the_tests_think() -> None:
    assert OPEN.inputs == (FakeTensor("x", "FP32", (4, -1)), FakeTensor("mask", "BOOL", (-1,)))


def test_a_control_plane_connects_again_after_a_close(server: FakeServer) -> None:
    async def main() -> None:
        control = plane(server)
        await control.server_metadata()
        control.close()
        await control.server_metadata()
        control.close()
        await asyncio.sleep(0)

    run(main())
