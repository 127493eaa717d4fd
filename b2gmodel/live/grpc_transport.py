"""The transport over gRPC: what a user's own client would do, with as few copies as gRPC allows.

gRPC takes each message as one piece of memory, so a batch is copied twice on its way to the socket: joined here,
and into the library's own slice. Many flights share one channel (HTTP/2 multiplexes them); more channels can be
asked for. The library tells neither when a message has left nor when the first byte of an answer came: both stamps
are None. tritonclient, which brings the protocol's messages, is heavy and imported only where a channel opens.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

from b2gmodel.errors import ServerError
from b2gmodel.flights import ExchangeTimes
from b2gmodel.live.infer import check_payloads, garbled, results_of
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.tensors import Tensor
from b2gmodel.live.transport import Delivery, Payload, ordinary_memory

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Channels to one address share a connection unless told otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # The address given is the server's, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
    # A server that comes back is found within this; the library would wait for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_LENGTH_DELIMITED: Final = 2
_READY_TIMEOUT_S: Final = 10.0


class GrpcTransport:
    """The KServe v2 protocol over gRPC.

    Args:
        host, port: the server's gRPC endpoint.
        channels: connections; batches take them in turn.
    """

    name = "grpc"

    def __init__(self, host: str, port: int, model: ModelSpec, *, channels: int = 1) -> None:
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._model = model
        self._wanted = channels
        self._channels: list[_Channel] = []
        self._turns = itertools.count()

    def payload_memory(self, nbytes: int) -> memoryview:
        return ordinary_memory(nbytes)

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        check_payloads(self._model, payloads)
        channels = self._open()
        channel = channels[next(self._turns) % len(channels)]
        times = ExchangeTimes(send_begin_ns=time.monotonic_ns())
        answer = await channel.infer(self._model, batch_id, payloads)
        times.response_end_ns = time.monotonic_ns()
        if answer.id != batch_id:
            raise garbled(self._model, f"the answer to batch {answer.id!r} came for batch {batch_id!r}")
        if len(answer.raw_output_contents) != len(answer.outputs):
            observed = f"{len(answer.outputs)} outputs, {len(answer.raw_output_contents)} of them as raw bytes"
            raise garbled(self._model, observed)
        outputs = [
            Tensor(output.name, output.datatype, tuple(output.shape), memoryview(data))
            for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
        ]
        return Delivery(results_of(self._model, len(payloads), outputs), times)

    async def warm(self, channels: int) -> None:
        """Connects the channels that were asked for; flights beyond them need none of their own."""
        for channel in self._open():
            await channel.ready()

    async def aclose(self) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    def _open(self) -> list[_Channel]:
        if not self._channels:
            self._channels = [_Channel(self._address) for _ in range(self._wanted)]
        return self._channels


class _Channel:
    """One connection, and the one method that is called on it."""

    def __init__(self, address: str) -> None:
        import grpc  # type: ignore[import-untyped]
        from tritonclient.grpc import service_pb2

        self._address = address
        self._failure: type[Any] = grpc.aio.AioRpcError
        self._message = service_pb2.ModelInferRequest
        self._raw_field = self._message.DESCRIPTOR.fields_by_name["raw_input_contents"].number
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._infer = self._channel.unary_unary(
            _METHOD, request_serializer=b"".join, response_deserializer=service_pb2.ModelInferResponse.FromString
        )

    async def infer(self, model: ModelSpec, batch_id: str, payloads: Sequence[Payload]) -> Any:
        """The server's answer. Raises ``ServerError`` with its words."""
        try:
            return await self._infer(self._pieces(model, batch_id, payloads))
        except self._failure as error:
            raise ServerError(
                "the server refused the batch, or cannot be reached",
                observed=f"gRPC {error.code().name} {error.details()}",
                where=f"{model.name} at {self._address}",
            ) from error

    async def ready(self) -> None:
        """Connect. Raises ``ServerError`` where nothing answers."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), _READY_TIMEOUT_S)
        except TimeoutError:
            raise ServerError(
                "cannot reach the server",
                observed=f"no gRPC connection within {_READY_TIMEOUT_S:g} s",
                where=self._address,
                hint="check that this is its gRPC address (Triton: port 8001 by default)",
            ) from None

    async def close(self) -> None:
        await self._channel.close()

    def _pieces(self, model: ModelSpec, batch_id: str, payloads: Sequence[Payload]) -> list[bytes | Any]:
        """The request in the wire form of protobuf, where a message's fields may follow one another in pieces.

        So the payloads need not pass through a message object, which would copy them twice more.
        """
        request = self._message(model_name=model.name, id=batch_id)
        for tensor in model.inputs:
            shape = model.batch_shape(tensor, len(payloads))
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        pieces: list[bytes | Any] = [request.SerializeToString()]
        for position, tensor in enumerate(model.inputs):
            tag = _varint(self._raw_field << 3 | _LENGTH_DELIMITED)
            pieces.append(tag + _varint(len(payloads) * tensor.row_bytes))
            pieces.extend(payload[position] for payload in payloads)
        return pieces


def _varint(value: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first, the top bit on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
