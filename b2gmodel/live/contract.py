"""What a request must be for one model to serve it, and how a result goes back onto the wire. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from b2gmodel.errors import ServerError, UsageError
from b2gmodel.live import messages
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.messages import Datatype, Limits, Request, WireError
from b2gmodel.live.tensors import Result
from b2gmodel.live.transport import Payload
from b2gmodel.live.wire import Buffer, encode


class Contract:
    """One model's side of the wire.

    A request is one row: each input once, in any order, with the model's datatype and its shape without the
    batch dimension. So is a result.

    Args:
        model: with every input dimension known.

    Raises:
        UsageError: an input of BYTES, which has no fixed size: a slot for it cannot be set aside.
    """

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.payload_bytes = model.payload_bytes
        self.limits = Limits(payload_bytes=max(Limits().payload_bytes, self.payload_bytes))
        self._expected = tuple(
            messages.TensorSpec(tensor.name, _datatype(tensor.datatype), tensor.shape, tensor.row_bytes)
            for tensor in model.inputs
        )
        self._by_name = {spec.name: spec for spec in self._expected}

    def objection(self, request: Request) -> str | None:
        """Why this model cannot serve the request, in one line; None where it can."""
        if request.model != self.model.name:
            return f"this proxy serves {self.model.name!r}, not {request.model[:80]!r}"
        if request.inputs == self._expected:
            return None
        given = {spec.name: spec for spec in request.inputs}
        if given.keys() != self._by_name.keys():
            wanted = ", ".join(self._by_name)
            return f"{self.model.name} takes the inputs {wanted}, not {', '.join(given)[:200]}"
        for name, spec in self._by_name.items():
            if given[name] != spec:
                return (
                    f"input {name} is {given[name].datatype.name} {list(given[name].shape)}, must be "
                    f"{spec.datatype.name} {list(spec.shape)}, without the batch dimension"
                )
        return None

    def inputs(self, request: Request, payload: memoryview) -> Payload:
        """The inputs in the model's order, as views of a payload that is in the request's order."""
        views: dict[str, memoryview] = {}
        begin = 0
        for spec in request.inputs:
            views[spec.name] = payload[begin : begin + spec.byte_length]
            begin += spec.byte_length
        return tuple(views[spec.name] for spec in self._expected)

    def result_frame(self, request_id: int, result: Result) -> tuple[list[Buffer], int]:
        """The frame of a result, to be gathered, and the bytes of its payload.

        Raises:
            ServerError: the server's answer cannot be put on the wire.
        """
        try:
            specs = tuple(_spec(each.name, each.datatype, each.shape, each.data.nbytes) for each in result)
            payloads: Sequence[Buffer] = [each.data for each in result]
            frame = encode(messages.Result(request_id, specs), payloads, limits=self.limits)
        except (WireError, KeyError) as error:
            raise ServerError(
                "the server's answer cannot be passed on", observed=str(error), where=self.model.name
            ) from error
        return frame, sum(spec.byte_length for spec in specs)


@lru_cache(maxsize=256)
def _spec(name: str, datatype: str, shape: tuple[int, ...], nbytes: int) -> messages.TensorSpec:
    return messages.TensorSpec(name, Datatype[datatype], shape, nbytes)


def _datatype(name: str) -> Datatype:
    if name not in Datatype.__members__:
        raise UsageError("not a datatype", observed=name, allowed=", ".join(Datatype.__members__), where="model input")
    return Datatype[name]
