"""The infer request and its answer in the binary tensor protocol over HTTP, and what every transport checks.

No timing here: the transport that sends the messages takes the stamps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote

from b2gmodel.errors import ServerError, UsageError
from b2gmodel.live.http import Buffer, HttpResponse
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.tensors import Result, Tensor, split_batch

INFERENCE_HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_EMPTY: Final = (
    "the model answered nothing: Triton 2.51's Python backend does so where the server's Python has NumPy 2; "
    "give it numpy<2"
)

Payload = Sequence[Buffer]
"""One request's inputs: one buffer an input of the model, in the model's order."""


def check_payloads(model: ModelSpec, payloads: Sequence[Payload]) -> None:
    """Raises ``UsageError`` where a payload is not the model's: a short one would shift its neighbours' rows."""
    sizes = [tensor.row_bytes for tensor in model.inputs]
    for payload in payloads:
        seen = [memoryview(part).nbytes for part in payload]
        if seen != sizes:
            raise UsageError(
                "the payload does not fit the model's inputs",
                observed=f"{seen} bytes",
                allowed=f"{sizes} bytes, for {', '.join(tensor.name for tensor in model.inputs)}",
                where=model.name,
            )


def results_of(model: ModelSpec, k: int, outputs: Iterable[Tensor]) -> tuple[Result, ...]:
    """A batch's results, one a request. Raises ``ServerError`` where they are not what the model declares."""
    came = tuple(outputs)
    try:
        return split_batch(came, model.outputs, rows=k, batched=model.max_batch_size > 0)
    except ValueError as error:
        raise garbled(model, str(error), hint=None if all(each.data.nbytes for each in came) else _EMPTY) from error


def garbled(model: ModelSpec, observed: str, hint: str | None = None) -> ServerError:
    """The error for an answer that does not belong to its batch."""
    return ServerError("the server's answer does not fit the batch", observed=observed, where=model.name, hint=hint)


class InferMessage:
    """Request and answer for one model and batch size."""

    def __init__(self, model: ModelSpec, k: int) -> None:
        self.target = f"/v2/models/{quote(model.name, safe='')}/infer"
        self._model, self._k = model, k
        self._inputs: list[dict[str, Any]] = [
            {"name": tensor.name, "shape": model.batch_shape(tensor, k), "datatype": tensor.datatype}
            for tensor in model.inputs
        ]
        self._sizes = [{"binary_data_size": k * tensor.row_bytes} for tensor in model.inputs]

    def encode(self, batch_id: str, payloads: Sequence[Payload]) -> tuple[list[tuple[str, str]], list[Buffer]]:
        """Headers and body for a batch.

        Args:
            batch_id: comes back in the answer, and stands in the server's trace.
            payloads: one a request.

        Raises:
            UsageError: a payload of the wrong size.
        """
        check_payloads(self._model, payloads)
        header = self._header(batch_id, self._sizes)
        body: list[Buffer] = [header]
        for position in range(len(self._model.inputs)):
            body.extend(payload[position] for payload in payloads)
        headers = [("Content-Type", "application/octet-stream"), (INFERENCE_HEADER_LENGTH, str(len(header)))]
        return headers, body

    def encode_shared(self, batch_id: str, places: Sequence[tuple[str, int]]) -> list[Buffer]:
        """The body for a batch that lies in shared memory: ``places`` gives region and offset of each input."""
        parameters = [
            {
                "shared_memory_region": region,
                "shared_memory_offset": offset,
                "shared_memory_byte_size": size["binary_data_size"],
            }
            for (region, offset), size in zip(places, self._sizes, strict=True)
        ]
        return [self._header(batch_id, parameters)]

    def _header(self, batch_id: str, parameters: Sequence[dict[str, Any]]) -> bytes:
        inputs = [{**head, "parameters": each} for head, each in zip(self._inputs, parameters, strict=True)]
        content = {"id": batch_id, "inputs": inputs, "parameters": {"binary_data_output": True}}
        return json.dumps(content, separators=(",", ":")).encode()

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
            outputs = self._outputs(batch_id, response)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise garbled(self._model, f"{type(error).__name__}: {error}") from error
        return results_of(self._model, self._k, outputs)

    def _outputs(self, batch_id: str, response: HttpResponse) -> list[Tensor]:
        json_bytes = int(response.headers.get(INFERENCE_HEADER_LENGTH.lower(), response.body.nbytes))
        answer = json.loads(bytes(response.body[:json_bytes]))
        if answer.get("id") != batch_id:  # the protocol has it come back where it was sent
            raise garbled(self._model, f"the answer to batch {answer.get('id')!r} came for batch {batch_id!r}")
        outputs, at = [], json_bytes
        for output in answer["outputs"]:
            if "data" in output:
                raise garbled(self._model, f"output {output['name']} came as text, where binary was asked for")
            size = int(output["parameters"]["binary_data_size"])
            data = response.body[at : at + size]
            if data.nbytes != size:
                raise garbled(self._model, f"output {output['name']} has {data.nbytes} of its {size} bytes")
            outputs.append(Tensor(output["name"], output["datatype"], tuple(map(int, output["shape"])), data))
            at += size
        if at != response.body.nbytes:
            raise garbled(self._model, f"{response.body.nbytes - at} bytes after the last output")
        return outputs
