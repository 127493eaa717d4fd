"""A calibration or a measurement taken across a fault is invalid by name: an error of its kind, never a number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from fault_rig import run
from fault_targets import Fake, fake_model

from b2gmodel.errors import EvidenceError, ServerError
from b2gmodel.live.bench import Bench, Setting
from b2gmodel.live.fake import FakeScript, Fault, FaultKind
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.point import calibrate_point
from b2gmodel.live.stall import refuse_stall
from b2gmodel.live.transport import HttpTransport
from b2gmodel.records import CalibrationPoint, Run

SCRIPT = FakeScript((fake_model(),))
SECONDS, BUDGET_S, BEFORE_S = 1.0, 2.0, 0.4
SETTINGS = [Setting("D0", 1, 4), Setting("C4", 8, 4)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr("b2gmodel.live.kserve._BOOKING_TIMEOUT_S", 0.3)
    with Fake(SCRIPT) as server:
        yield server


Work = Callable[[HttpTransport, ControlPlane], Awaitable[object]]
Hurt = Callable[[Fake], Awaitable[None]]


async def calibration(transport: HttpTransport, control: ControlPlane) -> CalibrationPoint:
    model = await control.model("m", {})
    point, _ = await calibrate_point(
        transport, control, model, 8, budget_s=BUDGET_S, precision=1e-6, trace_file=None, run_id="r",
        told=lambda _share: None,
    )  # fmt: skip
    return point


def measurement(setting: Setting) -> Callable[[HttpTransport, ControlPlane], Awaitable[object]]:
    async def taken(transport: HttpTransport, control: ControlPlane) -> Run | int:
        model = await control.model("m", {})
        bench = Bench(transport, control, model, make_payloads(model, setting.concurrency, transport), "r")
        await bench.warm_up(setting)
        if setting.placement == "D0":
            return len((await bench.take(setting, "0", SECONDS)).driven.counted)
        run, _ = await bench.run(setting, 0, SECONDS)
        return run

    return taken


async def across(fake: Fake, work: Work, hurt: Hurt) -> object:
    """What ``work`` gives while the server is hurt in the middle of it."""
    control = ControlPlane("127.0.0.1", fake.port)
    transport = HttpTransport("127.0.0.1", fake.port, await control.model("m", {}))
    working = asyncio.ensure_future(work(transport, control))
    try:
        await asyncio.sleep(BEFORE_S)
        assert not working.done()
        await hurt(fake)
        return await working
    finally:
        working.cancel()
        await asyncio.wait([working])
        await transport.aclose()
        control.close()


async def nothing(fake: Fake) -> None:
    pass


async def pause(fake: Fake) -> None:
    fake.pause()
    await asyncio.sleep(1.2)
    fake.resume()


async def restart(fake: Fake) -> None:
    fake.kill()
    await asyncio.to_thread(fake.start)


async def reset(fake: Fake) -> None:
    fake.install(FakeScript(SCRIPT.models, (Fault(FaultKind.COUNTERS_RESET, at=(3,)),)))


async def run_backwards(fake: Fake) -> None:
    fake.install(FakeScript(SCRIPT.models, (Fault(FaultKind.COUNTERS_BACKWARD, at=(3,)),)))


WORKS: dict[str, Work] = {"calibration": calibration, **{each.placement: measurement(each) for each in SETTINGS}}


@pytest.mark.parametrize("name", WORKS)
def test_without_a_fault_there_is_a_number(fake: Fake, name: str) -> None:
    async def test() -> None:
        assert await across(fake, WORKS[name], nothing)

    run(test())


@pytest.mark.parametrize("name", WORKS)
def test_a_pause(fake: Fake, name: str) -> None:
    async def test() -> None:
        with pytest.raises(EvidenceError, match="the run stood still: saw 'nothing was delivered for"):
            await across(fake, WORKS[name], pause)

    run(test())


@pytest.mark.parametrize("name", ["calibration", "C4"])
def test_a_restart(fake: Fake, name: str) -> None:
    async def test() -> None:
        with pytest.raises(ServerError):
            await across(fake, WORKS[name], restart)

    run(test())


@pytest.mark.parametrize("hurt", [reset, run_backwards])
@pytest.mark.parametrize("name", ["calibration", "C4"])
def test_counters_that_are_reset_or_run_backwards(fake: Fake, name: str, hurt: Hurt) -> None:
    async def test() -> None:
        with pytest.raises((EvidenceError, ServerError), match=r"counters|book|executions|not ours"):
            await across(fake, WORKS[name], hurt)

    run(test())


MS = 1_000_000


@pytest.mark.parametrize(
    ("waits_ms", "cycles_ms", "stood_still"),
    [
        ([], [], False),
        ([10, 1_000], [10, 10, 10], False),
        ([10, 1_001], [10, 10, 10], True),
        ([1_500], [300, 300, 1_500], False),
        ([1_501], [300, 300, 1_501], True),
        ([9_000] * 3, [9_000] * 3, False),
    ],
)
def test_what_standing_still_is(waits_ms: list[int], cycles_ms: list[int], stood_still: bool) -> None:
    """More than a second, and more than five median cycles; a server that is merely slow stands still nowhere."""
    times = [[each * MS for each in values] for values in (waits_ms, cycles_ms)]
    if stood_still:
        with pytest.raises(EvidenceError, match="here: the run stood still"):
            refuse_stall(*times, where="here")
    else:
        refuse_stall(*times, where="here")
