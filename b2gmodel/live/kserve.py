"""The KServe v2 protocol over HTTP, beside inference: what a server says of its models and its counters."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from b2gmodel.errors import ServerError, UsageError
from b2gmodel.live.http import HttpConnection, HttpResponse
from b2gmodel.live.tensors import BYTES_PER_ELEMENT, Result, Tensor, TensorSpec
from b2gmodel.units import s_from_ns

__all__ = [
    "BYTES_PER_ELEMENT",
    "BatchCounters",
    "ControlPlane",
    "ModelCounters",
    "ModelSpec",
    "Result",
    "Tensor",
    "TensorSpec",
]

_BOOKING_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 10.0
_SPIN_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its server describes it, with every dimension of its inputs known; an output's may be -1."""

    name: str
    version: str
    platform: str
    max_batch_size: int
    instances: int | None
    dynamic_batching: bool | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    compute: str
    parameters: Mapping[str, str]
    preferred_batch_sizes: tuple[int, ...] | None = None
    queue_delay_s: float | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of one request's inputs."""
        return sum(tensor.row_bytes for tensor in self.inputs)

    def batch_shape(self, tensor: TensorSpec, k: int) -> list[int]:
        """The shape of a batch of ``k`` as the server counts it: with the batch dimension where the model batches."""
        return [k, *tensor.shape] if self.max_batch_size > 0 else list(tensor.shape)


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

    @property
    def booked_executions(self) -> int:
        """Those that all counters show: the server books its total and its batch sizes one after the other."""
        return min(self.executions, sum(each.executions for each in self.by_batch_size.values()))

    @property
    def booked_requests(self) -> int:
        """As ``booked_executions``, in requests."""
        return min(self.inferences, sum(size * each.executions for size, each in self.by_batch_size.items()))


class ControlPlane:
    """What a server tells about itself, over one kept-alive connection off the timed path.

    Args:
        timeout_s: longest wait for an answer.
        awake: stay awake while waiting, where there are processors enough: one that sleeps while the counters are
            read wakes slowly, and the cycle that follows pays for it.
        known: the server was reached before, so that where it is gone it has failed.
    """

    def __init__(
        self, host: str, port: int, *, timeout_s: float = _ANSWER_TIMEOUT_S, awake: bool = False, known: bool = False
    ) -> None:
        spin_ns = _SPIN_NS if awake and len(os.sched_getaffinity(0)) > 1 else 0
        self._connection = HttpConnection(host, port, spin_ns=spin_ns)
        self._timeout_s = timeout_s
        self._reached = known

    def close(self) -> None:
        self._connection.close()

    async def _get(self, target: str) -> HttpResponse:
        return await self._ask("GET", target)

    async def _ask(self, method: str, target: str, body: bytes = b"") -> HttpResponse:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._reach()
                return await self._connection.request(method, target, body=[body] if body else [])
        except TimeoutError:
            raise ServerError(
                "the server does not answer",
                observed=f"{method} {target}",
                allowed=f"{self._timeout_s:g} s",
                where=self._connection.address,
                hint="is it hung, or something else that listens there?",
            ) from None

    async def _reach(self) -> None:
        """No server at this address is the caller's to mend; one that was reached once and is gone has failed."""
        if self._reached:
            return
        try:
            await self._connection.connect()
        except ServerError as error:
            raise UsageError(error.problem, observed=error.observed, where=error.where, hint=error.hint) from error
        self._reached = True

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

    async def model(self, name: str, shapes: Mapping[str, Sequence[int]], *, where: str = "--model") -> ModelSpec:
        """The model's description, its dynamic dimensions filled in from ``shapes`` (input name -> dims).

        Raises:
            UsageError: no such model, one that does not batch described as such by ``max_batch_size`` 0 is
                returned, not refused; a dynamic dimension without a shape, or a shape that contradicts the model.
        """
        metadata, config = await self.describe(name, where=where)
        try:
            return _spec(name, metadata, config, shapes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerError(
                "the server's description of the model does not have the form of the KServe v2 protocol",
                observed=f"{type(error).__name__}: {error}",
                where=name,
            ) from error

    async def describe(self, name: str, *, where: str = "--model") -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's metadata and configuration as the server gives them; without a configuration, an empty one.

        Raises:
            UsageError: no such model.
        """
        path = f"/v2/models/{quote(name, safe='')}"
        response = await self._get(path)
        if response.status != 200:
            raise UsageError(
                "the server does not serve this model",
                observed=f"{name} ({response.error_text()})",
                where=where,
                hint=await self._models_hint(),
            )
        config_response = await self._get(f"{path}/config")
        return response.json(), config_response.json() if config_response.status == 200 else {}

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
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerError(
                "the server's statistics do not have the form of the KServe v2 statistics extension",
                observed=f"{type(error).__name__}: {error}",
                where=name,
            ) from error

    async def set_trace(self, name: str, settings: Mapping[str, Any]) -> None:
        """Change the trace setting of one model; None puts a value back to the server's own.

        Raises:
            ServerError: the server does not trace, or refuses the setting.
        """
        body = json.dumps(settings).encode()
        target = f"/v2/models/{quote(name, safe='')}/trace/setting"
        response = await self._ask("POST", target, body)
        if response.status != 200:
            raise ServerError(
                "the server does not trace",
                observed=f"HTTP {response.status} {response.error_text()}",
                where=name,
                hint="start it with its trace extension enabled and a trace file set",
            )

    async def booked_counters(self, name: str, executions: int) -> ModelCounters:
        """The model's statistics once it has booked that many executions in all: it does so just after it answers.

        Raises:
            ServerError: it did not within ``_BOOKING_TIMEOUT_S``, or its counters ran backwards.
        """
        deadline_s = time.monotonic() + _BOOKING_TIMEOUT_S
        while True:
            counters = await self.counters(name)
            if counters.booked_executions >= executions:
                return counters
            if time.monotonic() > deadline_s:
                raise ServerError(
                    "the server did not book our batches in its statistics",
                    observed=f"{counters.booked_executions} executions",
                    allowed=f"{executions} within {_BOOKING_TIMEOUT_S:g} s",
                    where=name,
                    hint="did it restart, or does it keep no batch statistics? Then S cannot be separated from D",
                )

    async def _models_hint(self) -> str:
        response = await self._ask("POST", "/v2/repository/index", b"{}")
        try:
            entries = [(str(entry["name"]), entry.get("state")) for entry in response.json()]
        except (ServerError, AttributeError, KeyError, TypeError):
            return "check the name with the server's operator"
        # A server that loads models on demand gives no state to those that it has not loaded.
        states = any(state is not None for _, state in entries)
        names = ", ".join(sorted({name for name, state in entries if state == "READY" or not states}))
        return f"it serves: {names or 'no model'}" if states else f"in its repository, loaded or not: {names or 'none'}"


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
    merging = config.get("dynamic_batching")
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
        outputs=tuple(_output_spec(entry, max_batch_size > 0) for entry in metadata.get("outputs", ())),
        compute=parameters.get("b2g_compute", "real"),
        parameters=parameters,
        preferred_batch_sizes=None if merging is None else _preferred(merging),
        queue_delay_s=None
        if merging is None
        else s_from_ns(1_000 * int(merging.get("max_queue_delay_microseconds", 0))),
    )


def _preferred(merging: dict[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(int(size) for size in merging.get("preferred_batch_size", ())))


def _output_spec(entry: dict[str, Any], batched: bool) -> TensorSpec:
    dims = tuple(int(dim) for dim in entry["shape"])
    return TensorSpec(str(entry["name"]), str(entry["datatype"]), dims[1:] if batched else dims)


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
