"""The transport through shared memory, for a proxy and a server on one host: no payload byte crosses a socket.

Payloads that lie side by side in this transport's memory, in any order, travel without being copied; others are
copied into a scratch area first, and counted. Only the request's description and the results cross HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from b2gmodel.errors import ServerError
from b2gmodel.live.http import Buffer
from b2gmodel.live.http_pool import HttpPool
from b2gmodel.live.infer import InferMessage, check_payloads
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.shared_memory import Region, RegionOwner, address_of
from b2gmodel.live.transport import Delivery, Payload

_Place = tuple[str, int]
"""Region and offset."""


class ShmTransport:
    """The binary tensor protocol with inputs in system shared memory, described over HTTP.

    Args:
        host, port: the server's HTTP endpoint; it has to see this process's ``/dev/shm``.

    Attributes:
        copied_batches: batches of which at least one input did not lie in place.
    """

    name = "shm"

    def __init__(self, host: str, port: int, model: ModelSpec) -> None:
        self._model = model
        self._pool = HttpPool(host, port)
        self._owner = RegionOwner(self._pool)
        self._messages: dict[int, InferMessage] = {}
        self._scratch: list[Region] = []
        self.copied_batches = 0

    def payload_memory(self, nbytes: int) -> memoryview:
        return self._owner.allocate(nbytes).memory

    async def infer(self, batch_id: str, payloads: Sequence[Payload]) -> Delivery:
        check_payloads(self._model, payloads)
        k = len(payloads)
        if k not in self._messages:
            self._messages[k] = InferMessage(self._model, k)
        message = self._messages[k]
        order = sorted(range(k), key=lambda row: address_of(payloads[row][0]))
        scratch: Region | None = None
        places: list[_Place] = []
        filled = 0
        try:
            for position, tensor in enumerate(self._model.inputs):
                column = [payloads[row][position] for row in order]
                place = self._place(column, tensor.row_bytes)
                if place is None:
                    scratch = scratch or self._take_scratch(k)
                    place = (scratch.name, filled)
                    for part in column:
                        filled = scratch.fill(filled, part)
                places.append(place)
            self.copied_batches += scratch is not None
            await self._owner.register()
            response = await self._pool.request("POST", message.target, body=message.encode_shared(batch_id, places))
            if response.status != 200:
                self._owner.doubt()
        except ServerError:
            self._owner.doubt()
            raise
        finally:
            if scratch is not None:
                self._scratch.append(scratch)
        rows = dict(zip(order, message.decode(batch_id, response), strict=True))
        return Delivery(tuple(rows[row] for row in range(k)), response.times)

    async def warm(self, channels: int) -> None:
        await self._pool.warm(channels)
        await self._owner.register()

    async def aclose(self) -> None:
        try:
            await self._owner.aclose()
        finally:
            self._pool.close()

    def _place(self, column: Sequence[Buffer], row_bytes: int) -> _Place | None:
        """Where these rows lie, if they follow one another within one region."""
        begin = address_of(column[0])
        if any(address_of(part) != begin + row * row_bytes for row, part in enumerate(column)):
            return None
        return self._owner.find(begin, len(column) * row_bytes)

    def _take_scratch(self, k: int) -> Region:
        """An area for a whole batch, its inputs one after another, that no other flight uses."""
        nbytes = k * self._model.payload_bytes
        for region in self._scratch:
            if region.memory.nbytes >= nbytes:
                self._scratch.remove(region)
                return region
        return self._owner.allocate(nbytes)
