"""What the fake server says in the KServe v2 protocol, in the shapes of Triton 2.51: no clock, no I/O.

Bodies, status codes and error texts follow what a real server answered to the same requests; the binary
tensor protocol only (a request without ``Inference-Header-Content-Length`` is refused).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from b2gmodel.live.fake_script import STRUCT_CODES, FakeModel, FakeTensor, FaultKind

FINGERPRINT_BYTES: Final = 8
_WRAP: Final = 2**64
_SAME_WIDTH: Final = {1: ("INT8", "UINT8"), 2: ("INT16", "FP16"), 4: ("INT32", "FP32"), 8: ("INT64", "FP64")}

SERVER_METADATA: Final = {
    "name": "fake",
    "version": "2.51.0",
    "extensions": ["binary_tensor_data", "statistics"],
}


class RejectedError(Exception):
    """The request gets this error status and text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(slots=True)
class Tally:
    """A counter pair: events and their total ns, each an unsigned 64-bit number that wraps."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, sign: int) -> None:
        """Book one event of ``ns``, or take it away where ``sign`` is -1."""
        self.count = (self.count + sign) % _WRAP
        self.ns = (self.ns + sign * ns) % _WRAP

    def document(self) -> dict[str, int]:
        """The pair as the statistics show it."""
        return {"count": self.count, "ns": self.ns}


def unknown_model(name: str) -> str:
    """The error text for a model that the server does not have."""
    return f"Request for unknown model: '{name}' is not found"


_STAGES: Final = ("compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class Counters:
    """A model's cumulative statistics. One execution is one request: nothing is merged."""

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Tally = field(default_factory=Tally)
    fail: Tally = field(default_factory=Tally)
    queue: Tally = field(default_factory=Tally)
    compute: dict[str, Tally] = field(default_factory=lambda: {stage: Tally() for stage in _STAGES})
    batches: dict[int, dict[str, Tally]] = field(default_factory=dict)

    def book(self, rows: int, queue_ns: int, stages_ns: Sequence[int], *, wall_ms: int, sign: int = 1) -> None:
        """Add one execution (``sign`` -1 takes it away): rows, ns in queue, ns of input, infer, output."""
        self.last_inference_ms = wall_ms
        self.inference_count = (self.inference_count + sign * rows) % _WRAP
        self.execution_count = (self.execution_count + sign) % _WRAP
        self.success.add(queue_ns + sum(stages_ns), sign)
        self.queue.add(queue_ns, sign)
        of_size = self.batches.setdefault(rows, {stage: Tally() for stage in _STAGES})
        for stage, ns in zip(_STAGES, stages_ns, strict=True):
            self.compute[stage].add(ns, sign)
            of_size[stage].add(ns, sign)

    def document(self, name: str) -> dict[str, Any]:
        """One member of ``model_stats``."""
        return {
            "name": name,
            "version": "1",
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": self.success.document(),
                "fail": self.fail.document(),
                "queue": self.queue.document(),
                **{stage: tally.document() for stage, tally in self.compute.items()},
                "cache_hit": Tally().document(),
                "cache_miss": Tally().document(),
            },
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **{stage: tally.document() for stage, tally in stages.items()}}
                for size, stages in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


def _full_shape(model: FakeModel, tensor: FakeTensor) -> list[int]:
    return [-1, *tensor.dims] if model.max_batch else list(tensor.dims)


def metadata(model: FakeModel) -> dict[str, Any]:
    """The body of ``GET /v2/models/M``."""

    def tensors(specs: Sequence[FakeTensor]) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": t.datatype, "shape": _full_shape(model, t)} for t in specs]

    return {
        "name": model.name,
        "versions": ["1"],
        "platform": "fake",
        "inputs": tensors(model.inputs),
        "outputs": tensors(model.outputs),
    }


def configuration(model: FakeModel) -> dict[str, Any]:
    """The body of ``GET /v2/models/M/config``: the fields that a client reads."""

    def tensors(specs: Sequence[FakeTensor]) -> list[dict[str, Any]]:
        names = {"BYTES": "TYPE_STRING"}
        return [
            {"name": t.name, "data_type": names.get(t.datatype, f"TYPE_{t.datatype}"), "dims": list(t.dims)}
            for t in specs
        ]

    merging = {"preferred_batch_size": [model.max_batch], "max_queue_delay_microseconds": 0}
    return {
        "name": model.name,
        "platform": "",
        "backend": "fake",
        "max_batch_size": model.max_batch,
        "input": tensors(model.inputs),
        "output": tensors(model.outputs),
        **({"dynamic_batching": merging} if model.dynamic_batching else {}),
        "instance_group": [{"name": f"{model.name}_0", "kind": "KIND_CPU", "count": model.instances, "gpus": []}],
        "parameters": {"b2g_compute": {"string_value": model.compute}},
    }


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request that passed every check: id, rows, a fingerprint a row, and the outputs (binary or not)."""

    request_id: str | None
    rows: int
    fingerprints: tuple[bytes, ...]
    wanted: tuple[tuple[FakeTensor, bool], ...]


def parse_infer(model: FakeModel, header_length: str | None, body: memoryview) -> InferRequest:
    """Read and check the body of an inference request; its tensors are looked at, never copied.

    Raises:
        RejectedError: with the status and, where the real server has one for the case, its text.
    """
    header_bytes = _header_bytes(header_length, len(body))
    try:
        document = json.loads(bytes(body[:header_bytes]))
        tensors = _slices(model, document, body, header_bytes)
        prefix = f"[request id: {document.get('id') or '<id_unknown>'}] "
        rows = {_check_input(model, spec, *tensors[spec.name], prefix) for spec in model.inputs}
        wanted = _wanted(model, document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RejectedError(500, f"failed to parse the request JSON buffer: {error}") from None
    if len(rows) != 1:
        raise RejectedError(400, f"{prefix}input batch sizes differ for model '{model.name}': {sorted(rows)}")
    count = rows.pop()
    first = tensors[model.inputs[0].name][1]
    return InferRequest(document.get("id"), count, _fingerprints(first, count), wanted)


def _slices(
    model: FakeModel, document: dict[str, Any], body: memoryview, start: int
) -> dict[str, tuple[dict[str, Any], memoryview]]:
    """Each of the model's inputs by name: its description and its part of the body."""
    known = {spec.name for spec in model.inputs}
    tensors = {}
    for item in document["inputs"]:
        if item["name"] not in known:
            raise RejectedError(400, f"unexpected inference input '{item['name']}' for model '{model.name}'")
        size = item.get("parameters", {}).get("binary_data_size")
        if not isinstance(size, int) or size < 0:
            raise RejectedError(400, f"the fake needs a binary_data_size for input '{item['name']}'")
        tensors[item["name"]] = (item, body[start : start + size])
        start += size
    if len(tensors) != len(known):
        text = f"expected {len(known)} inputs but got {len(tensors)} inputs for model '{model.name}'"
        raise RejectedError(400, text)
    if start < len(body):
        raise RejectedError(400, f"unexpected additional input data for model '{model.name}'")
    return tensors


def _header_bytes(text: str | None, body_bytes: int) -> int:
    if text is None:
        raise RejectedError(400, "the fake needs Inference-Header-Content-Length: it reads binary tensors")
    if not text.isdecimal() or not 0 < int(text) <= body_bytes:
        raise RejectedError(400, f"inference header size should be in range (0, {body_bytes}), got: {text}")
    return int(text)


def _check_input(model: FakeModel, spec: FakeTensor, item: dict[str, Any], data: memoryview, prefix: str) -> int:
    """Rows of one input whose datatype, shape and bytes agree with the model and with one another."""
    if item.get("datatype") != spec.datatype:
        raise RejectedError(
            400,
            f"{prefix}inference input '{spec.name}' data-type is '{item.get('datatype')}',"
            f" but model '{model.name}' expects '{spec.datatype}'",
        )
    shape, expected = item.get("shape"), _full_shape(model, spec)
    fits = (
        isinstance(shape, list)
        and len(shape) == len(expected)
        and all(
            isinstance(is_, int) and is_ >= 1 and want in (-1, is_) for is_, want in zip(shape, expected, strict=True)
        )
    )
    if not fits:
        raise RejectedError(
            400,
            f"{prefix}unexpected shape for input '{spec.name}' for model '{model.name}'."
            f" Expected {json.dumps(expected)}, got {json.dumps(shape)}",
        )
    assert isinstance(shape, list)
    rows = int(shape[0]) if model.max_batch else 1
    if rows > max(1, model.max_batch):
        raise RejectedError(
            400, f"{prefix}inference request batch-size must be <= {model.max_batch} for '{model.name}'"
        )
    if len(data) != math.prod(shape) * spec.element_bytes:
        raise RejectedError(
            400,
            f"{prefix}input byte size mismatch for input '{spec.name}' for model '{model.name}'."
            f" Expected {math.prod(shape) * spec.element_bytes}, got {len(data)}",
        )
    return rows


def _fingerprints(tensor: memoryview, rows: int) -> tuple[bytes, ...]:
    row_bytes = len(tensor) // rows
    prefix = min(FINGERPRINT_BYTES, row_bytes)
    return tuple(
        bytes(tensor[i * row_bytes : i * row_bytes + prefix]).ljust(FINGERPRINT_BYTES, b"\0") for i in range(rows)
    )


def _wanted(model: FakeModel, document: dict[str, Any]) -> tuple[tuple[FakeTensor, bool], ...]:
    outputs = document.get("outputs")
    if not outputs:
        binary = bool(document.get("parameters", {}).get("binary_data_output", False))
        return tuple((spec, binary) for spec in model.outputs)
    specs = {spec.name: spec for spec in model.outputs}
    for item in outputs:
        if item.get("name") not in specs:
            text = f"unexpected inference output '{item.get('name')}' for model '{model.name}'"
            raise RejectedError(400, text)
    return tuple((specs[o["name"]], bool(o.get("parameters", {}).get("binary_data", False))) for o in outputs)


def answer(
    model: FakeModel, request: InferRequest, faults: Container[FaultKind]
) -> tuple[list[tuple[str, str]], bytes]:
    """Headers (without Content-Length) and body of a good answer, or of one that lies as the faults say."""
    described = [_output(model, request, spec, as_binary) for spec, as_binary in request.wanted]
    for (spec, _), (item, _) in zip(request.wanted, described, strict=True):
        if FaultKind.WRONG_SHAPE in faults:
            item["shape"][0] += 1
        if FaultKind.WRONG_DATATYPE in faults:
            item["datatype"] = _other_datatype(spec)
    request_id = request.request_id
    if FaultKind.WRONG_ID in faults:
        request_id = f"not-{request_id}"
    document = {
        **({"id": request_id} if request_id else {}),
        "model_name": model.name,
        "model_version": "1",
        "outputs": [item for item, _ in described],
    }
    head = json.dumps(document, separators=(",", ":")).encode()
    binary = b"".join(payload for _, payload in described)
    if not binary:
        return [("Content-Type", "application/json")], head
    length = ("Inference-Header-Content-Length", str(len(head)))
    return [("Content-Type", "application/octet-stream"), length], head + binary


def _output(model: FakeModel, request: InferRequest, spec: FakeTensor, as_binary: bool) -> tuple[dict[str, Any], bytes]:
    """An output's description, with its data where not binary, and its binary data."""
    shape = [request.rows, *spec.dims] if model.max_batch else list(spec.dims)
    item: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
    payload = b"".join(_row(spec, fingerprint) for fingerprint in request.fingerprints)
    if as_binary:
        return {**item, "parameters": {"binary_data_size": len(payload)}}, payload
    if spec.datatype == "BYTES":
        elements = math.prod(spec.dims)
        return {**item, "data": [mark.hex() for mark in request.fingerprints for _ in range(elements)]}, b""
    values = struct.iter_unpack("<" + STRUCT_CODES[spec.datatype], payload)
    return {**item, "data": [value for (value,) in values]}, b""


def _row(spec: FakeTensor, fingerprint: bytes) -> bytes:
    elements = math.prod(spec.dims)
    if spec.datatype == "BYTES":
        return (struct.pack("<I", FINGERPRINT_BYTES) + fingerprint) * elements
    size = elements * spec.element_bytes
    return fingerprint[:size].ljust(size, b"\0")


def _other_datatype(spec: FakeTensor) -> str:
    if spec.datatype == "BYTES":
        return "UINT8"
    first, second = _SAME_WIDTH[spec.element_bytes]
    return second if spec.datatype == first else first
