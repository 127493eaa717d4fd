"""The instrument's test of itself: delays that the fake server injects must come back in the right leg.

The fake delays its reading, its compute and its answer by known amounts, in a process of its own; the same single
flight that calibrates a real server must book each delay where it was made. Legs are split with the fake's own log
as the server's marks, as the trace gives them for a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final

import numpy as np

from b2gmodel.errors import EvidenceError
from b2gmodel.legs import Legs, ServerMarks, split
from b2gmodel.live.cycles import SingleFlight
from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.fake_script import LogEntry
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.transport import HttpTransport
from b2gmodel.records import SelfTestLeg
from b2gmodel.units import ns_from_s, s_from_ns

SELF_TEST_DELAYS_S: Final = (0.01,)
SELF_TEST_CYCLES: Final = 3
_BOUND_SHARE: Final = 0.02
_BOUND_S: Final = 0.0003
_WARMUP: Final = 1
_ROUNDS: Final = 4
# A server that reads late finds the sockets' buffers full, one that reads at once does not: so the sending ends at
# another fill. Both sides of the comparison stall, one of them longer.
_STALL_NS: Final = 5_000_000

# The fake's delay, and the leg of ours that it must lengthen.
_INJECTIONS: Final = {
    "read_delay_ns": "send_ns",
    "receive_delay_ns": "server_receive_ns",
    "queue_delay_ns": "queue_ns",
    "compute_input_ns": "compute_input_ns",
    "compute_infer_base_ns": "compute_infer_ns",
    "compute_output_ns": "compute_output_ns",
    "answer_delay_ns": "return_ns",
    "return_delay_ns": "return_ns",
}
# Larger than the sockets' buffers, so that a server that does not read is felt while sending.
_MODEL: Final = FakeModel("self-test", inputs=(FakeTensor("x", "UINT8", (4800 * 1024,)),), max_batch=1)
_RECEIVE_BUFFER_BYTES: Final = 256 * 1024


async def self_test(
    delays_s: Sequence[float] = SELF_TEST_DELAYS_S, cycles: int = SELF_TEST_CYCLES
) -> tuple[SelfTestLeg, ...]:
    """Inject each delay into each leg, and say how much of it came back there.

    Raises:
        EvidenceError: a delay was not recovered within the larger of 2 % and 0.3 ms, in three tries of more and
            more cycles.
    """
    with FakeServer.start(_script(Delays())) as server:
        host, _, port = server.address.rpartition(":")
        control = ControlPlane(host, int(port))
        try:
            model = await control.model(_MODEL.name, {})
            transport = HttpTransport(host, int(port), model)
            try:
                bench = _SelfTest(server, SingleFlight(transport, control, model, 1, run_id="self-test"))
                return tuple([await bench.leg(name, delay_s, cycles) for delay_s in delays_s for name in _INJECTIONS])
            finally:
                await transport.aclose()
        finally:
            control.close()


def _script(delays: Delays) -> FakeScript:
    return FakeScript((replace(_MODEL, delays=delays),), receive_buffer_bytes=_RECEIVE_BUFFER_BYTES)


def within_bound(leg: SelfTestLeg) -> bool:
    """Whether the instrument booked the delay where it was made."""
    return abs(leg.recovered_s - leg.injected_s) <= max(_BOUND_SHARE * leg.injected_s, _BOUND_S)


class _SelfTest:
    def __init__(self, server: FakeServer, flight: SingleFlight) -> None:
        self._server, self._flight = server, flight

    async def leg(self, name: str, delay_s: float, cycles: int) -> SelfTestLeg:
        for attempt in (cycles, 3 * cycles, 9 * cycles):
            leg = await self._try(name, delay_s, attempt)
            if within_bound(leg):
                return leg
        raise EvidenceError(
            f"the self-test failed: a delay in {leg.leg} was not booked there",
            observed=f"{leg.recovered_s * 1e3:.3f} ms of {delay_s * 1e3:g} ms",
            allowed="within the larger of 2 % and 0.3 ms",
            where=name,
            hint="this machine is too busy to be an instrument now, or the instrument is broken: try again when quiet",
        )

    async def _try(self, name: str, delay_s: float, cycles: int) -> SelfTestLeg:
        """The leg's lower quartile with the delay less that without it: others' work on this machine only lengthens.

        Blocks of the two alternate, so that what drifts meets both.
        """
        base_ns = _STALL_NS if name == "read_delay_ns" else 0
        delays = {base_ns: Delays(**{name: base_ns})}
        delays[base_ns + ns_from_s(delay_s)] = Delays(**{name: base_ns + ns_from_s(delay_s)})
        seen: dict[int, list[int]] = {injected_ns: [] for injected_ns in delays}
        for _ in range(_ROUNDS):
            for injected_ns, script in delays.items():
                seen[injected_ns] += await self._block_ns(script, _INJECTIONS[name], cycles)
        without, with_delay = (float(np.quantile(values, 0.25)) for values in seen.values())
        return SelfTestLeg(
            leg=f"{_INJECTIONS[name].removesuffix('_ns')} ({name.removesuffix('_ns')})",
            injected_s=delay_s,
            recovered_s=s_from_ns(with_delay - without),
        )

    async def _block_ns(self, delays: Delays, leg: str, cycles: int) -> list[int]:
        self._server.install(_script(delays))
        await self._flight.run_unread(_WARMUP)
        seen = await self._flight.run(cycles)
        log = {entry.request_id: entry for entry in self._server.log()}
        return [getattr(split(cycle, _marks(log[f"self-test.{cycle.flight.flight_id}"])), leg) for cycle in seen]


def _marks(entry: LogEntry) -> ServerMarks:
    names = ("queue_start_ns", "compute_start_ns", "input_end_ns", "infer_end_ns", "compute_end_ns")
    return ServerMarks(*(getattr(entry, name) for name in names))


assert set(_INJECTIONS.values()) < {field.name for field in fields(Legs)}
