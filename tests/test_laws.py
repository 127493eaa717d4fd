"""The transport law and the compute law, measured on the fake (known delays) and on the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_bench import MODEL, endpoint_of, run

from b2gmodel.cli import run as b2g
from b2gmodel.errors import ServerError, UsageError
from b2gmodel.live.bench import Bench, Setting
from b2gmodel.live.calibrate import Wanted, calibrate
from b2gmodel.live.fake import Delays, FakeScript, FakeServer
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.tensors import BYTES_PER_ELEMENT
from b2gmodel.records import Calibration

NULL = replace(MODEL, name="m_null", delays=Delays(compute_infer_base_ns=300_000, receive_delay_ns=2_000_000))
TWO = replace(MODEL, name="two", instances=2, delays=Delays(compute_infer_base_ns=3_000_000))
OTHER = replace(MODEL, name="other_null", max_batch=4)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer.start(FakeScript((MODEL, NULL, TWO, OTHER))) as running:
        yield running


def calibrated(server: FakeServer, model: str, null: str | None) -> Calibration:
    wanted = Wanted(model, (2,), budget_s=0.5, null_model=null)
    calibration, _ = run(
        calibrate(endpoint_of(server), wanted, name="x", session_id="s", progress=lambda _stage, _share: None)
    )
    return calibration


def test_the_nulls_own_instance_time_is_taken_out(server: FakeServer) -> None:
    law = calibrated(server, "m", "m_null").points[0].transport_law
    assert law is not None
    assert (law.null_model, law.k, law.batch_bytes) == ("m_null", 2, 2 * 12 * BYTES_PER_ELEMENT["FP32"])
    assert [point.flights for point in law.points] == [1, 2, 3, 4, 6, 8]
    for point in law.points:
        assert point.service_s >= 0.0003
        # The delay of 2 ms that the fake makes outside its counters is transport, at every number of flights.
        assert point.transport_s >= 0.002
        assert point.cycle_s == pytest.approx(point.transport_s + point.service_s + point.queue_s)
        assert point.batches_per_s.mean == pytest.approx(point.flights / point.cycle_s)
    assert law.points[3].batches_per_s.mean > law.points[0].batches_per_s.mean


def test_s_is_seen_beside_null_batches_too(server: FakeServer) -> None:
    """The fake's instances do not slow each other down: S stays what it is, and only null batches are beside it."""
    law = calibrated(server, "m", "m_null").points[0].transport_law
    assert law is not None
    assert [(point.null_flights, point.cycles) for point in law.loaded] == [(0, 45), (1, 45), (2, 45)]
    alone, *beside = (point.service_s for point in law.loaded)
    assert all(0.5 * alone < service_s < 5 * alone for service_s in beside)


def test_without_a_null_model_heights_are_said_to_be_upper_bounds(server: FakeServer) -> None:
    calibration = calibrated(server, "m", None)
    assert calibration.points[0].transport_law is None
    note = (
        "no transport law was measured, as that takes a null model (--null-model): predicted heights are upper bounds"
    )
    assert note in calibration.notes


def test_several_instances_have_a_compute_law_of_at_most_as_many_flights(server: FakeServer) -> None:
    law = calibrated(server, "two", None).points[0].compute_law
    assert law is not None
    assert [point.flights for point in law.points] == [1, 2]
    assert all(point.service_s >= 0.003 for point in law.points)


def test_a_null_model_of_other_batches_is_refused(server: FakeServer) -> None:
    with pytest.raises(UsageError, match="the null model does not take the model's batches: its max_batch_size"):
        calibrated(server, "m", "other_null")


@pytest.mark.real
def test_the_twin_of_a_served_model(triton: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://{}:{}".format(*triton.http_address)
    assert b2g(["server", "--export-null", str(tmp_path), "--url", url, "--model", "resnet50"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"written: {tmp_path / 'resnet50_null'}\n")
    config = (tmp_path / "resnet50_null" / "config.pbtxt").read_text()
    assert '"input"' in config
    assert "3, 224, 224" in config
    assert (tmp_path / "resnet50_null" / "1" / "model.py").exists()
    assert b2g(["server", "--export-null", str(tmp_path), "--url", url, "--model", "resnet50"]) == 2
    assert "the null model is there already" in capsys.readouterr().err
    assert b2g(["server", "--export-null", str(tmp_path)]) == 2


@pytest.mark.real
def test_legs_and_trace_on_the_real_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerant_self_test: None
) -> None:
    calibrate_here = ["calibrate", "-k", "8", "--budget", "2s", "--null-model", "none", "--out", str(tmp_path)]
    assert b2g([*calibrate_here, "--name", "x", "-q", "--json"]) == 0
    calibration = json.loads(capsys.readouterr().out)["calibrations"][0]["calibration"]
    assert len(calibration["self_test"]) == 8
    legs = calibration["points"][0]["legs"]
    assert legs["unsplit_s"] is None
    assert legs["residual_share"] <= 0.005
    assert abs(legs["trace_difference"]) <= 0.03


def test_a_null_model_that_fails_beside_the_model_ends_the_calibration() -> None:
    """Its error is the calibration's, not a group of errors that nobody catches."""
    bench = object.__new__(Bench)

    async def fails(*_: object) -> None:
        raise ServerError("the null model is gone")

    async def beside() -> None:
        async with bench.kept_busy(Setting("C3", 1, 1), "x"):
            await asyncio.sleep(10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "_drive", fails)
        with pytest.raises(ServerError, match="the null model is gone"):
            asyncio.run(beside())
