"""Diagnostics: each by a case beyond its bound and one just within, and none from what is not stated."""

from __future__ import annotations

import builders
import pytest

from b2gmodel.diagnostics import of_calibration, server_overhead, under_load
from b2gmodel.measured_diagnostics import of_measurement
from b2gmodel.records import (
    CalibrationPoint,
    Diagnostic,
    Estimate,
    LegTimes,
    Measurement,
    ModelInfo,
    Prediction,
    Session,
)


def legs(server_receive_s: float | None) -> LegTimes:
    facts: dict[str, object] = dict.fromkeys(LegTimes.model_fields)
    return LegTimes.model_validate(facts | {"cycles": 10, "server_receive_s": server_receive_s, "residual_share": 0.0})


def point(**changes: object) -> CalibrationPoint:
    """S = 10 ms, D = 15 ms."""
    return builders.point().model_copy(update=changes)


def of_point(seen: CalibrationPoint, **model: object) -> list[Diagnostic]:
    return list(of_calibration(builders.calibration(seen, model=builders.model_info(**model)), seen))


def names(found: list[Diagnostic]) -> list[str]:
    return [each.name for each in found]


def check_sentence(found: Diagnostic, observed: str, bound: str, *advice: str) -> None:
    """The sentence says the number, and what to do; the record holds number and bound."""
    assert observed in found.sentence
    for each in advice:
        assert each in found.sentence
    assert f"{found.bound:g}" == bound
    assert "\n" not in found.sentence


class TestServerOverhead:
    def test_more_than_s_is_said(self) -> None:
        (found,) = of_point(point(queue_s=Estimate(mean=0.002), legs=legs(0.013)))
        assert (found.name, found.observed) == ("server-overhead", pytest.approx(1.5))
        check_sentence(found, "1.5 times as long", "1", "larger batches or shared memory")

    def test_as_much_as_s_is_not(self) -> None:
        assert of_point(point(queue_s=Estimate(mean=0.002), legs=legs(0.008))) == []

    @pytest.mark.parametrize(
        ("changes", "overhead"),
        [
            ({}, None),
            ({"legs": legs(None)}, None),
            ({"legs": legs(0.005)}, 0.5),
            ({"queue_s": Estimate(mean=0.005)}, 0.5),
            ({"queue_s": Estimate(mean=0.005), "legs": legs(None)}, 0.5),
            ({"service_s": None, "queue_s": Estimate(mean=0.005)}, None),
        ],
    )
    def test_of_what_is_stated(self, changes: dict[str, object], overhead: float | None) -> None:
        assert server_overhead(point(**changes)) == overhead


class TestServiceOverWall:
    def test_in_single_flight(self) -> None:
        (found,) = of_point(point(cycle_s=Estimate(mean=0.0097)))
        assert (found.name, found.observed) == ("service-over-wall", pytest.approx(0.010 / 0.0097))
        check_sentence(found, "1.03 seconds of service a second on 1 instance(s)", "1", "check instance_group")

    def test_rounding_is_not_said(self) -> None:
        assert of_point(point(cycle_s=Estimate(mean=0.0099))) == []


class TestServiceUnderLoad:
    @pytest.mark.parametrize(("loaded_s", "change"), [(0.0115, 0.15), (0.0085, -0.15)])
    def test_by_the_compute_law(self, loaded_s: float, change: float) -> None:
        (found,) = of_point(point(compute_law=builders.compute_law(0.010, loaded_s)), instances=2)
        assert (found.name, found.observed) == ("service-under-load", pytest.approx(change))
        word = "longer" if change > 0 else "shorter"
        check_sentence(found, f"S is 15% {word} under load", f"{0.1 * change / 0.15:g}", "fix the clocks")

    def test_a_little_is_not_said(self) -> None:
        assert of_point(point(compute_law=builders.compute_law(0.010, 0.0109)), instances=2) == []

    @pytest.mark.parametrize(("held_s", "said"), [(0.0025, True), (0.0015, False)])
    def test_by_the_nulls_growth(self, held_s: float, said: bool) -> None:
        """The null holds its instance 1.5 ms longer, 15 % of S; half a millisecond is 5 %."""
        law = builders.transport_law([50, 80], held_s=[0.001, held_s])
        assert names(of_point(point(transport_law=law))) == ["service-under-load"] * said


@pytest.mark.parametrize("missing", ["service_s", "cycle_s"])
def test_without_times_nothing_is_said_of_a_calibration(missing: str) -> None:
    assert of_point(point(queue_s=Estimate(mean=9.0)).model_copy(update={missing: None})) == []


def test_an_ordinary_calibration_has_none() -> None:
    assert of_point(point()) == []
    law = builders.transport_law([50, 80, 100])
    assert of_point(point(transport_law=law, queue_s=Estimate(mean=0.0), legs=legs(0.001)), instances=None) == []


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """S = 10 ms, D = 15 ms, k = 8: X(1) = 320, g C / S = 2.5 times that at most."""
    return builders.prediction()


def measured(prediction: Prediction, curve: dict[int, float], **facts: object) -> Measurement:
    """One session; ``facts`` are those of each run, a list where they differ by run."""
    whole = builders.measurement(prediction, {m: [x] for m, x in curve.items()}, baseline=1e6)
    (session,) = whole.sessions
    runs = []
    for number, run in enumerate(session.runs):
        if run.placement == "C1":
            runs.append(run)
            continue
        own = {name: value[number] if isinstance(value, list) else value for name, value in facts.items()}
        runs.append(run.model_copy(update=own))
    return whole.model_copy(update={"sessions": (session.model_copy(update={"runs": tuple(runs)}),)})


def said(prediction: Prediction, curve: dict[int, float], **facts: object) -> list[Diagnostic]:
    return list(of_measurement(prediction, measured(prediction, curve, **facts)))


def changed_model(prediction: Prediction, **changes: object) -> Prediction:
    model: ModelInfo = prediction.model.model_copy(update=changes)
    return prediction.model_copy(update={"model": model})


class TestGainAboveLimit:
    def test_beyond_g_c_over_s(self, prediction: Prediction) -> None:
        (found,) = said(prediction, {1: 300.0, 3: 810.0})
        assert (found.name, found.observed, found.bound) == ("gain-above-limit", pytest.approx(2.7), 2.5)
        check_sentence(
            found, "2.70 times the single-flight throughput", "2.5", "g C / S allows 2.50", "read S at M > 1"
        )

    def test_within_the_slack(self, prediction: Prediction) -> None:
        assert said(prediction, {1: 300.0, 3: 780.0}) == []

    def test_merging_by_the_server_is_known_to_do_so(self, prediction: Prediction) -> None:
        assert said(changed_model(prediction, dynamic_batching=True), {1: 300.0, 3: 990.0}) == []

    def test_without_single_flight_there_is_no_gain(self, prediction: Prediction) -> None:
        assert said(prediction, {2: 300.0, 3: 990.0}) == []


class TestPlateauBelowCompute:
    def test_an_idle_instance(self, prediction: Prediction) -> None:
        """At 560 request/s, 70 batches a second of 10 ms each: busy for 70 %."""
        (found,) = said(prediction, {1: 320.0, 4: 560.0}, service_s=0.010)
        assert (found.name, found.observed) == ("plateau-below-compute", pytest.approx(0.7))
        check_sentence(found, "busy 70% of the time", "0.9", "try shared memory, more connections")

    def test_a_busy_one(self, prediction: Prediction) -> None:
        assert said(prediction, {1: 320.0, 4: 730.0}, service_s=0.010) == []

    def test_two_instances_share_the_work(self, prediction: Prediction) -> None:
        (found,) = said(changed_model(prediction, instances=2), {1: 320.0, 4: 730.0}, service_s=0.010)
        assert found.observed == pytest.approx(730 / 8 * 0.010 / 2)

    def test_single_flight_alone_is_no_plateau(self, prediction: Prediction) -> None:
        assert said(prediction, {1: 320.0}, service_s=0.010) == []

    @pytest.mark.parametrize("missing", ["k", "service_s"])
    def test_not_without_k_or_s(self, prediction: Prediction, missing: str) -> None:
        bare = prediction.model_copy(update={missing: None})
        assert said(bare, {1: 320.0, 4: 560.0}, service_s=0.010) == []


class TestMeasuredService:
    def test_over_wall(self, prediction: Prediction) -> None:
        """107 batches of 10 ms in a second."""
        found = said(prediction, {1: 320.0, 4: 800.0}, service_s=0.010, batches=[40, 107], duration_s=1.0)
        assert names(found) == ["service-over-wall"]
        assert found[0].observed == pytest.approx(1.07)
        check_sentence(found[0], "1.07 seconds of service a second on 1 instance(s)", "1", "was not restarted")

    @pytest.mark.parametrize(("instances", "batches"), [(1, 104), (2, 208)])
    def test_not_over_wall(self, prediction: Prediction, instances: int, batches: int) -> None:
        of = changed_model(prediction, instances=instances)
        facts = {"service_s": 0.010, "batches": [40, batches], "duration_s": 1.0}
        assert "service-over-wall" not in names(said(of, {1: 320.0, 4: 800.0}, **facts))

    @pytest.mark.parametrize(("loaded_s", "change"), [(0.0115, 0.15), (0.0085, -0.15)])
    def test_under_load(self, prediction: Prediction, loaded_s: float, change: float) -> None:
        """Against the S that the prediction states; S of the single-flight run has no part in it."""
        (found,) = said(prediction, {1: 320.0, 4: 8 * 0.95 / loaded_s * 0.999}, service_s=[0.5, loaded_s])[-1:]
        assert (found.name, found.observed) == ("service-under-load", pytest.approx(change))

    def test_under_load_a_little(self, prediction: Prediction) -> None:
        assert said(prediction, {1: 320.0, 4: 750.0}, service_s=0.0109) == []

    @pytest.mark.parametrize(("loaded_s", "off"), [(0.0100, -0.20), (0.0113, None), (0.0125, None), (0.0150, 0.20)])
    def test_s_under_load_is_not_what_the_heights_were_predicted_with(
        self, prediction: Prediction, loaded_s: float, off: float | None
    ) -> None:
        of = prediction.model_copy(update={"diagnostics": (under_load(0.25),)})
        found = said(of, {1: 320.0, 4: 8 * 0.95 / loaded_s}, service_s=loaded_s)
        seen = [each.observed for each in found if each.name == "service-not-as-predicted"]
        assert seen == ([] if off is None else [pytest.approx(off)])
        if off is not None:
            bound = f"{0.1 if off > 0 else -0.1:g}"
            check_sentence(found[-1], "S = 12.5 ms under load", bound, f"{1e3 * loaded_s:g} ms was", "calibrate anew")


class TestWhatIsNotStated:
    def test_rates_alone(self, prediction: Prediction) -> None:
        assert said(prediction, {1: 320.0, 4: 400.0}) == []

    def test_no_multi_flight_run(self, prediction: Prediction) -> None:
        whole = measured(prediction, {1: 320.0})
        (session,) = whole.sessions
        bare: Session = session.model_copy(update={"runs": session.runs[-1:]})
        assert of_measurement(prediction, whole.model_copy(update={"sessions": (bare,)})) == ()

    @pytest.mark.parametrize("facts", [{"service_s": 0.0}, {"service_s": 0.010, "duration_s": 1.0}])
    def test_half_of_the_counters(self, prediction: Prediction, facts: dict[str, object]) -> None:
        assert said(prediction, {1: 320.0, 4: 790.0}, **facts) == []

    def test_a_model_of_unknown_instances_and_batching(self, prediction: Prediction) -> None:
        of = changed_model(prediction, instances=None, dynamic_batching=None)
        assert names(said(of, {1: 320.0, 4: 560.0}, service_s=0.010)) == ["plateau-below-compute"]
