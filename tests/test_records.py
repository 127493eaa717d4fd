"""Records: frozen, strict, and one byte string each."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import builders
import pytest
from pydantic import ValidationError

from b2gmodel.records import (
    RECORD_TYPES,
    Calibration,
    Estimate,
    Measurement,
    Plan,
    Prediction,
    canonical_bytes,
    digest_of,
    json_schema,
)


def test_the_digest_is_of_the_canonical_bytes() -> None:
    record = Estimate(mean=0.1, low=None, high=2.0)
    content = b'{"cv":null,"high":2,"level":null,"low":null,"mean":0.1,"quantiles":null}'
    assert canonical_bytes(record) == content
    assert digest_of(record) == hashlib.sha256(content).hexdigest()


def test_the_order_of_fields_does_not_change_the_digest() -> None:
    facts = builders.calibration().model_dump(mode="json")
    turned = json.dumps(dict(reversed(facts.items())))
    assert digest_of(Calibration.model_validate_json(turned)) == digest_of(builders.calibration())


@pytest.mark.parametrize("kind", ["b2g.calibration", "b2g.prediction", "b2g.measurement"])
def test_a_record_survives_its_own_bytes(kind: str) -> None:
    prediction = builders.prediction()
    records: dict[str, Any] = {
        "b2g.calibration": builders.calibration(),
        "b2g.prediction": prediction,
        "b2g.measurement": builders.measurement(prediction, {1: [320.0], 3: [600.0]}),
    }
    content = canonical_bytes(records[kind])
    again = RECORD_TYPES[kind].model_validate_json(content)
    assert again == records[kind]
    assert canonical_bytes(again) == content


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        builders.calibration().name = "other"  # type: ignore[misc]


class TestRefusals:
    """One planted defect in a record that is sound without it."""

    def refused(self, kind: type[Calibration | Prediction | Measurement], facts: dict[str, Any]) -> str:
        with pytest.raises(ValidationError) as seen:
            kind.model_validate_json(json.dumps(facts))
        error = seen.value.errors()[0]  # the one that the user is shown
        return ".".join(map(str, error["loc"]))

    def calibration(self, **changes: Any) -> dict[str, Any]:
        return builders.calibration().model_dump(mode="json") | changes

    def test_the_sound_record_is_taken(self) -> None:
        Calibration.model_validate_json(json.dumps(self.calibration()))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("name", "../elsewhere"),
            ("name", ".hidden"),
            ("name", "-option"),
            ("name", ""),
            ("name", "a" * 129),
            ("name", "a\n"),
            ("version", 2),
            ("record", "b2g.prediction"),
            ("source", "x" * 4097),
            ("session_ids", "s0"),
            ("points", []),
            ("unknown", 1),
        ],
    )
    def test_fields(self, field: str, value: Any) -> None:
        assert self.refused(Calibration, self.calibration(**{field: value})).startswith(field)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("k", 0),
            ("k", 8.5),
            ("k", "8"),
            ("payload_bytes", -1),
            ("throughput_per_s", 0.0),
            ("throughput_per_s", float("nan")),
            ("throughput_per_s", float("inf")),
            ("elapsed_s", -1.0),
            ("stopped_by", "whim"),
            ("cycle_s", {"mean": float("nan")}),
            ("cycle_s", {"mean": 1.0, "cv": -0.1}),
            ("cycle_s", {"mean": 1.0, "level": 1.0}),
            ("blocks", [{"session": 0, "cycle_s": 1.0, "service_s": 0.0}]),
        ],
    )
    def test_points(self, field: str, value: Any) -> None:
        facts = self.calibration()
        facts["points"][0][field] = value
        assert self.refused(Calibration, facts).startswith(f"points.0.{field}")

    @pytest.mark.parametrize("field", ["predictors", "claims"])
    def test_a_prediction_that_predicts_or_claims_nothing(self, field: str) -> None:
        facts = builders.prediction().model_dump(mode="json") | {field: []}
        assert self.refused(Prediction, facts) == field

    @pytest.mark.parametrize("flights", [[], [0, 1], [2, 1], [1, 1], [True], [1.0], list(range(1, 258))])
    def test_flights_of_a_plan(self, flights: list[Any]) -> None:
        facts = builders.prediction().model_dump(mode="json")
        facts["plan"]["flights"] = flights
        assert self.refused(Prediction, facts).startswith("plan.flights")

    def test_a_measurement_without_runs(self) -> None:
        facts = builders.measurement(builders.prediction(), {1: [1.0]}).model_dump(mode="json") | {"sessions": []}
        assert self.refused(Measurement, facts) == ""

    @pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64])
    def test_a_digest(self, digest: str) -> None:
        facts = builders.measurement(builders.prediction(), {1: [1.0]}).model_dump(mode="json")
        assert self.refused(Measurement, facts | {"prediction_digest": digest}) == "prediction_digest"


def test_a_point_is_found_by_its_batch_size() -> None:
    record = builders.calibration(builders.point(2), builders.point(None))
    assert [record.point(2), record.point(None), record.point(3)] == [*record.points, None]


def test_what_a_predictor_does_not_say_is_none() -> None:
    result = builders.prediction().predictors[0]
    assert result.at(17) is None
    assert result.at(3) == result.curve[2]


@pytest.mark.parametrize("kind", [Calibration, Prediction, Measurement, Plan])
def test_each_record_has_a_schema(kind: Any) -> None:
    assert json_schema(kind)["additionalProperties"] is False
