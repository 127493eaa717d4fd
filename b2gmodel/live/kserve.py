"""The KServe v2 protocol over HTTP: what a server says of its models and counters, and the binary tensor message.

No timing here: the transport that sends the messages takes the stamps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from b2gmodel.errors import ServerError, UsageError
from b2gmodel.live.http import Buffer, HttpConnection, HttpResponse

BYTES_PER_ELEMENT: Final[Mapping[str, int]] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
INFERENCE_HEADER_LENGTH: Final = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one request: its shape is without the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's tensor. Raises ``UsageError`` for a type of no fixed size."""
        if self.datatype not in BYTES_PER_ELEMENT:
            raise UsageError(
                "a tensor of this type has no fixed size",
                observed=self.datatype,
                allowed=", ".join(BYTES_PER_ELEMENT),
                where=f"tensor {self.name}",
                hint="calibrate with a model whose inputs have fixed-size elements",
            )
        return math.prod(self.shape) * BYTES_PER_ELEMENT[self.datatype]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its server describes it, with every dimension known."""

    name: str
    version: str
    platform: str
    max_batch_size: int
    instances: int | None
    dynamic_batching: bool | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    compute: str
    parameters: Mapping[str, str]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one request's inputs."""
        return sum(tensor.row_bytes for tensor in self.inputs)


@dataclass(frozen=True, slots=True)
class BatchCounters:
    """The server's cumulative counters for one batch size of one model; each execution is counted once."""

    executions: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    def since(self, before: BatchCounters) -> BatchCounters:
        """What was added since ``before``. Raises ``ServerError`` where a counter ran backwards."""
        added = BatchCounters(
            self.executions - before.executions,
            self.compute_input_ns - before.compute_input_ns,
            self.compute_infer_ns - before.compute_infer_ns,
            self.compute_output_ns - before.compute_output_ns,
        )
        lowest = min(added.executions, added.compute_input_ns, added.compute_infer_ns, added.compute_output_ns)
        if lowest < 0:
            raise ServerError(
                "the server's counters ran backwards",
                observed=lowest,
                allowed=">= 0",
                where="model statistics",
                hint="did the server restart? run again: this run's counters are no evidence",
            )
        return added

    @property
    def service_ns(self) -> int:
        return self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns


NO_EXECUTIONS: Final = BatchCounters(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ModelCounters:
    """All counters of one model at one moment; ``queue_ns`` is charged per request, the rest per execution."""

    executions: int
    inferences: int
    queue_ns: int
    by_batch_size: Mapping[int, BatchCounters]

    def of(self, k: int) -> BatchCounters:
        return self.by_batch_size.get(k, NO_EXECUTIONS)


class ControlPlane:
    """What a server tells about itself, over one kept-alive connection off the timed path."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = HttpConnection(host, port)

    def close(self) -> None:
        self._connection.close()

    async def _get(self, target: str) -> HttpResponse:
        return await self._connection.request("GET", target)

    async def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        response = await self._get("/v2")
        if response.status != 200:
            raise UsageError(
                "this address answers, but not as a KServe v2 server",
                observed=f"HTTP {response.status}",
                where=self._connection.address,
                hint="give the address of the server's HTTP endpoint (Triton: port 8000 by default)",
            )
        metadata = response.json()
        if not isinstance(metadata, dict):
            raise ServerError("the server's metadata is no object", observed=type(metadata).__name__)
        return metadata

    async def model(self, name: str, shapes: Mapping[str, Sequence[int]]) -> ModelSpec:
        """The model's description, its dynamic dimensions filled in from ``shapes`` (input name -> dims).

        Raises:
            UsageError: no such model, one that does not batch described as such by ``max_batch_size`` 0 is
                returned, not refused; a dynamic dimension without a shape, or a shape that contradicts the model.
        """
        path = f"/v2/models/{quote(name, safe='')}"
        response = await self._get(path)
        if response.status != 200:
            raise UsageError(
                "the server does not serve this model",
                observed=f"{name} ({response.error_text()})",
                where="--model",
                hint=await self._models_hint(),
            )
        metadata = response.json()
        config_response = await self._get(f"{path}/config")
        config = config_response.json() if config_response.status == 200 else {}
        return _spec(name, metadata, config, shapes)

    async def counters(self, name: str) -> ModelCounters:
        """The model's statistics. Raises ``ServerError`` where the server keeps none per batch."""
        response = await self._get(f"/v2/models/{quote(name, safe='')}/stats")
        if response.status != 200:
            raise ServerError(
                "the server gives no statistics for this model",
                observed=f"HTTP {response.status} {response.error_text()}",
                where=name,
                hint="the statistics extension is what separates S from D: start the server with it enabled",
            )
        try:
            return _counters(response.json()["model_stats"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerError(
                "the server's statistics do not have the form of the KServe v2 statistics extension",
                observed=f"{type(error).__name__}: {error}",
                where=name,
            ) from error

    async def _models_hint(self) -> str:
        response = await self._connection.request("POST", "/v2/repository/index", body=[b"{}"])
        if response.status != 200:
            return "check the name with the server's operator"
        names = [str(entry.get("name")) for entry in response.json() if entry.get("state", "READY") == "READY"]
        return f"it serves: {', '.join(sorted(names)) or 'no model'}"


def _spec(
    name: str, metadata: dict[str, Any], config: dict[str, Any], shapes: Mapping[str, Sequence[int]]
) -> ModelSpec:
    max_batch_size = int(config.get("max_batch_size", 0))
    inputs = []
    declared = {entry["name"]: entry for entry in metadata.get("inputs", ())}
    unknown = set(shapes) - set(declared)
    if unknown:
        raise UsageError(
            "the model has no such input",
            observed=", ".join(sorted(unknown)),
            allowed=", ".join(declared),
            where="--shape",
        )
    missing = []
    for input_name, entry in declared.items():
        dims = [int(dim) for dim in entry["shape"]]
        # With batching, the metadata's shape starts with the batch dimension.
        dims = dims[1:] if max_batch_size > 0 else dims
        given = shapes.get(input_name)
        if given is not None:
            fits = len(given) == len(dims) and all(a in (-1, b) and b > 0 for a, b in zip(dims, given, strict=True))
            if not fits:
                raise UsageError(
                    "the shape does not fit the model's input",
                    observed=f"{input_name}:{','.join(map(str, given))}",
                    allowed=f"{input_name}:{','.join('any' if dim < 0 else str(dim) for dim in dims)}",
                    where="--shape",
                    hint="give it without the batch dimension",
                )
            dims = list(given)
        if any(dim < 0 for dim in dims):
            missing.append(f"--shape {input_name}:{','.join('?' if dim < 0 else str(dim) for dim in dims)}")
        inputs.append(TensorSpec(input_name, str(entry["datatype"]), tuple(dims)))
    if missing:
        raise UsageError(
            "the model has inputs of dynamic shape",
            observed=", ".join(missing),
            allowed="positive numbers in place of each ?",
            where=name,
            hint="add these options, without the batch dimension",
        )
    if not inputs:
        raise ServerError("the model's metadata names no inputs", where=name)
    groups = config.get("instance_group") or ()
    parameters = {
        key: str(value.get("string_value", "")) if isinstance(value, dict) else str(value)
        for key, value in (config.get("parameters") or {}).items()
    }
    return ModelSpec(
        name=name,
        version=str((metadata.get("versions") or ["?"])[-1]),
        platform=str(metadata.get("platform", "")),
        max_batch_size=max_batch_size,
        instances=sum(int(group.get("count", 1)) * max(1, len(group.get("gpus") or ())) for group in groups) or None,
        dynamic_batching="dynamic_batching" in config if config else None,
        inputs=tuple(inputs),
        outputs=tuple(str(entry["name"]) for entry in metadata.get("outputs", ())),
        compute=parameters.get("b2g_compute", "real"),
        parameters=parameters,
    )


def _counters(model_stats: list[dict[str, Any]]) -> ModelCounters:
    entry = model_stats[0]
    by_size = {
        int(row["batch_size"]): BatchCounters(
            executions=int(row["compute_infer"]["count"]),
            compute_input_ns=int(row["compute_input"]["ns"]),
            compute_infer_ns=int(row["compute_infer"]["ns"]),
            compute_output_ns=int(row["compute_output"]["ns"]),
        )
        for row in entry.get("batch_stats", ())
    }
    return ModelCounters(
        executions=int(entry.get("execution_count", 0)),
        inferences=int(entry.get("inference_count", 0)),
        queue_ns=int(entry["inference_stats"]["queue"]["ns"]),
        by_batch_size=by_size,
    )


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of an answer; ``data`` is one request's share of it, shape without the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


Result = tuple[Tensor, ...]


class InferMessage:
    """The infer request and its answer for one model and batch size in the binary tensor protocol."""

    def __init__(self, model: ModelSpec, k: int) -> None:
        self.target = f"/v2/models/{quote(model.name, safe='')}/infer"
        self._model, self._k = model, k
        self._batched = model.max_batch_size > 0
        self._inputs = [
            {
                "name": tensor.name,
                "shape": [k, *tensor.shape] if self._batched else list(tensor.shape),
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": k * tensor.row_bytes},
            }
            for tensor in model.inputs
        ]

    def encode(self, batch_id: str, payloads: Sequence[Sequence[Buffer]]) -> tuple[list[tuple[str, str]], list[Buffer]]:
        """Headers and body for a batch.

        Args:
            batch_id: comes back in the answer, and stands in the server's trace.
            payloads: one sequence a request, holding one buffer an input of the model, in the model's order.
        """
        header = json.dumps(
            {"id": batch_id, "inputs": self._inputs, "parameters": {"binary_data_output": True}},
            separators=(",", ":"),
        ).encode()
        body: list[Buffer] = [header]
        for position in range(len(self._model.inputs)):
            body.extend(payload[position] for payload in payloads)
        headers = [("Content-Type", "application/octet-stream"), (INFERENCE_HEADER_LENGTH, str(len(header)))]
        return headers, body

    def decode(self, batch_id: str, response: HttpResponse) -> tuple[Result, ...]:
        """The batch's results, one a request, as views of the response's body.

        Raises:
            ServerError: the server refused, or its answer does not belong to this batch.
        """
        if response.status != 200:
            raise ServerError(
                "the server refused the batch",
                observed=f"HTTP {response.status} {response.error_text()}",
                where=self._model.name,
            )
        try:
            return self._decode(batch_id, response)
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise self._garbled(f"{type(error).__name__}: {error}") from error

    def _decode(self, batch_id: str, response: HttpResponse) -> tuple[Result, ...]:
        json_bytes = int(response.headers.get(INFERENCE_HEADER_LENGTH.lower(), response.body.nbytes))
        answer = json.loads(bytes(response.body[:json_bytes]))
        if answer.get("id", batch_id) != batch_id:
            raise self._garbled(f"the answer to batch {answer['id']!r} came for batch {batch_id!r}")
        rows: list[list[Tensor]] = [[] for _ in range(self._k)]
        at = json_bytes
        for output in answer["outputs"]:
            shape = tuple(int(dim) for dim in output["shape"])
            size = int(output["parameters"]["binary_data_size"])
            data = response.body[at : at + size]
            at += size
            if data.nbytes != size or (self._batched and (not shape or shape[0] != self._k)):
                raise self._garbled(f"output {output['name']} has shape {list(shape)} and {data.nbytes} bytes")
            row_shape = shape[1:] if self._batched else shape
            for row, part in zip(rows, self._split(output, row_shape, data), strict=True):
                row.append(Tensor(output["name"], output["datatype"], row_shape, part))
        if at != response.body.nbytes:
            raise self._garbled(f"{response.body.nbytes - at} bytes after the last output")
        return tuple(tuple(row) for row in rows)

    def _split(self, output: dict[str, Any], row_shape: tuple[int, ...], data: memoryview) -> list[memoryview]:
        """The ``k`` rows of an output, checked against its shape and datatype."""
        elements = math.prod(row_shape)
        if output["datatype"] == "BYTES":
            return _split_bytes(data, self._k, elements)
        row_bytes = elements * BYTES_PER_ELEMENT[output["datatype"]]
        if row_bytes * self._k != data.nbytes:
            raise ValueError(f"{data.nbytes} bytes for {self._k} rows of {row_bytes} in output {output['name']}")
        return [data[row * row_bytes : (row + 1) * row_bytes] for row in range(self._k)]

    def _garbled(self, observed: str) -> ServerError:
        return ServerError("the server's answer does not fit the batch", observed=observed, where=self._model.name)


def _split_bytes(data: memoryview, rows: int, elements: int) -> list[memoryview]:
    """Rows of a BYTES tensor: each element is a little-endian 32-bit length and that many bytes."""
    parts, at = [], 0
    for _ in range(rows):
        begin = at
        for _ in range(elements):
            (length,) = struct.unpack_from("<I", data, at)
            at += 4 + length
            if at > data.nbytes:
                raise ValueError("a BYTES element is longer than its tensor")
        parts.append(data[begin:at])
    if at != data.nbytes:
        raise ValueError(f"{data.nbytes - at} bytes after the last BYTES element")
    return parts
