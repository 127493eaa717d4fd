"""Calibrations -> Advice: by hand where times are constant, the latency exact against the reference, words whole."""

from __future__ import annotations

import json
from pathlib import Path

import builders
import numpy as np
import pytest
from cli_bench import Out, complained, said

from b2gmodel.advice import Advice, advise
from b2gmodel.advice_settings import Placed
from b2gmodel.advice_surface import Source, formation_waits_s
from b2gmodel.batcher import Policy
from b2gmodel.cli import run
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import Block, Calibration, CalibrationPoint
from b2gmodel.sim.distributions import Constant, Exponential, Gamma, Independent
from b2gmodel.sim.latency import SimulatedLatency, formed_responses_s
from b2gmodel.sim.reference import Run
from b2gmodel.sim.scenario import Recorded, Scenario
from b2gmodel.sim.stations import Line, Station
from b2gmodel.units import ns_from_s

# C = 10 ms and 25 ms; one batch after the other leaves the instance each 4 ms and 10 ms: at most 250 and 800 a second.
SMALL = builders.point(1, service_s=0.004, transport_s=0.006)
LARGE = builders.point(8, service_s=0.010, transport_s=0.015)


def source(*points: CalibrationPoint, **changes: object) -> Source:
    """Constant times: the simulation's figures are those of a drawing."""
    of = builders.calibration(*points).model_copy(update=changes)
    lent = {point.k or 0: SimulatedLatency(draws=20, cycles=400, batches=500, requests=2_000) for point in of.points}
    return Source(of, lent)


def advised(*points: CalibrationPoint, p99_s: float | None = None, rate_per_s: float | None = None) -> Advice:
    return advise([source(*points)], p99_s=p99_s, rate_per_s=rate_per_s, draws=40)


def reason(of: Advice, name: str) -> str:
    """The reason of that name."""
    (found,) = [line for line in of.reasons if line.startswith(f"{name}:")]
    return found


class TestSaturated:
    """k M callers: X(M) = min(M k / C, k / S), and each waits k M / X."""

    def test_most_throughput_without_a_budget(self) -> None:
        found = advised(SMALL, LARGE)
        assert (found.placement, found.k, found.flights, found.clients) == ("C4", 8, 3, 24)
        assert found.throughput.mean == pytest.approx(800, rel=0.01)
        assert found.p99 is not None
        assert found.p99.mean == pytest.approx(0.030)
        assert found.outcome == "none given"
        assert found.headroom is None

    @pytest.mark.parametrize(
        ("budget_s", "k", "flights", "placement"),
        [(0.0301, 8, 3, "C4"), (0.0299, 8, 2, "C4"), (0.0249, 1, 3, "C1"), (0.0119, 1, 2, "C1")],
    )
    def test_the_most_that_fits_a_budget(self, budget_s: float, k: int, flights: int, placement: Placed) -> None:
        found = advised(SMALL, LARGE, p99_s=budget_s)
        assert (found.outcome, found.k, found.flights, found.placement) == ("met", k, flights, placement)
        assert found.p99 is not None
        assert found.p99.mean <= budget_s
        assert "to spare" in reason(found, "budget")

    def test_single_flight_is_c3(self) -> None:
        found = advised(builders.point(service_s=0.010, transport_s=1e-5))
        assert (found.placement, found.k, found.flights) == ("C3", 8, 1)

    def test_a_budget_that_is_missed_by_a_known_amount(self) -> None:
        found = advised(LARGE, p99_s=0.020)
        assert found.outcome == "not met"
        assert found.missed_s == pytest.approx(0.005)
        assert (found.k, found.flights) == (8, 1)
        assert found.sentence.startswith("the budget cannot be met: p99 20 ms asked for, p99 25 ms")
        assert "at best, 5 ms (25%) too much: batch in the proxy: k = 8, M = 1" in found.sentence
        assert "would have to be 20% shorter" in reason(found, "to meet it")
        assert "most is transport" in reason(found, "to meet it")

    def test_compute_is_named_where_compute_is_most(self) -> None:
        found = advised(builders.point(service_s=0.015, transport_s=0.010), p99_s=0.020)
        assert "most is compute: a faster model or a smaller k would help first" in reason(found, "to meet it")
        # k = 1 was looked at here, and is no remedy.
        beside = builders.point(1, service_s=0.030, transport_s=0.010)
        more = advised(beside, builders.point(service_s=0.015, transport_s=0.010), p99_s=0.020)
        assert (more.k, "a faster model would help first" in reason(more, "to meet it")) == (8, True)

    def test_among_as_good_the_smallest_is_taken(self) -> None:
        # k = 16 carries 1.5 % more than k = 8, for which fewer callers have to wait.
        slightly = builders.point(16, service_s=0.0197, transport_s=0.0295)
        found = advised(LARGE, slightly)
        assert (found.k, found.flights) == (8, 3)
        assert "within 2% of the best throughput" in reason(found, "size")
        clearly = builders.point(16, service_s=0.0190, transport_s=0.0280)
        assert advised(LARGE, clearly).k == 16


class TestWhatBinds:
    def test_compute(self) -> None:
        law = builders.transport_law([66, 130, 190, 250], held_s=1e-12, relative_half_width=0.01)
        found = advised(LARGE.model_copy(update={"transport_law": law}))
        assert found.binding.what == "compute"
        assert found.throughput.mean == pytest.approx(800, rel=0.03)
        assert not found.is_bound

    def test_transport(self) -> None:
        law = builders.transport_law([66, 80, 80, 80], held_s=1e-12, relative_half_width=0.01)
        point = builders.point(service_s=0.002, transport_s=0.015).model_copy(update={"transport_law": law})
        found = advised(point)
        assert found.binding.what == "transport"
        assert found.throughput.mean == pytest.approx(640, rel=0.02)
        assert found.flights == 3


class TestRate:
    """Poisson requests: forming a batch takes time, and a small k wins where few come."""

    def test_few_requests_want_no_batches(self) -> None:
        found = advised(SMALL, LARGE, rate_per_s=20)
        assert (found.placement, found.k, found.formation_deadline_s) == ("C1", 1, None)
        assert found.p99 is not None
        assert found.p99.mean < 0.015

    def test_many_need_them(self) -> None:
        """The control: what one at a time cannot carry."""
        found = advised(SMALL, LARGE, rate_per_s=600)
        assert (found.placement, found.k) == ("C4", 8)
        assert found.headroom == pytest.approx(800 / 600 - 1, rel=0.02)
        assert found.outcome == "met"

    def test_a_lone_request_does_not_wait_for_seven_others(self) -> None:
        found = advised(LARGE, rate_per_s=5)
        assert found.formation_deadline_s == 0
        assert found.p99 is not None
        # C, and at worst S of one that came just before.
        assert 0.025 <= found.p99.mean <= 0.035
        patient = [each.p99_s for each in found.surface if (each.formation_deadline_s or 0) > 1]
        assert patient
        assert min(filter(None, patient)) > 1

    def test_what_cannot_be_carried(self) -> None:
        found = advised(LARGE, rate_per_s=1000)
        assert found.outcome == "not met"
        assert found.missed_per_s == pytest.approx(1050 - 800, rel=0.03)
        assert found.sentence.startswith("the rate cannot be carried with 5% to spare: 1000 request/s asked for")
        assert (found.missed_s, found.mean_s, found.p99) == (None, None, None)
        assert "where more comes than can be carried the queue grows without end: no latency is stated" in found.notes

    def test_headroom_is_what_is_best_within_a_budget(self) -> None:
        found = advised(SMALL, LARGE, rate_per_s=20, p99_s=0.5)
        assert (found.outcome, found.k, found.flights) == ("met", 8, 3)
        tight = advised(SMALL, LARGE, rate_per_s=20, p99_s=0.020)
        assert (tight.outcome, tight.k) == ("met", 1)

    def test_a_budget_below_any_cycle(self) -> None:
        found = advised(SMALL, LARGE, rate_per_s=20, p99_s=0.005)
        assert (found.outcome, found.k) == ("not met", 1)
        assert found.missed_s is not None
        assert 0.005 <= found.missed_s < 0.010

    def test_the_longest_deadline_leaves_one_batch_in_a_thousand_partial(self) -> None:
        rng = np.random.default_rng(1)
        *_, longest = formation_waits_s(8, 100)
        assert longest is not None
        gathered_s = rng.exponential(0.01, (200_000, 7)).sum(axis=1)
        assert float(np.mean(gathered_s > longest)) == pytest.approx(0.001, abs=0.0003)
        assert formation_waits_s(1, 100) == [None]


class TestWithoutSimulation:
    """Only bounds on latency are known then, and none is called a p99."""

    def bounded(self, p99_s: float | None = None, rate_per_s: float | None = None) -> Advice:
        of = builders.calibration(SMALL, LARGE)
        return advise([Source(of)], p99_s=p99_s, rate_per_s=rate_per_s, draws=40)

    def test_a_p99_is_not_stated(self) -> None:
        found = self.bounded()
        assert found.p99 is None
        assert {each.p99_s for each in found.surface} == {None}
        assert "p99 not known" in found.sentence
        assert "the p99 was not simulated for this setting; the latency stated is no p99" in found.notes

    def test_whether_a_budget_is_met_is_not_known(self) -> None:
        assert self.bounded(p99_s=0.5).outcome == "unknown"

    def test_that_it_is_not_met_is_known_by_the_bound(self) -> None:
        found = self.bounded(p99_s=0.005)
        assert found.outcome == "not met"
        assert found.missed_s == pytest.approx(0.005)

    def test_a_rate(self) -> None:
        found = self.bounded(rate_per_s=20)
        assert (found.outcome, found.k) == ("met", 1)
        assert "mean latency at least" in found.sentence

    def test_a_server_that_merges_has_no_simulation(self) -> None:
        of = builders.calibration(SMALL, LARGE, model=builders.model_info(dynamic_batching=True, max_batch_size=16))
        found = advise([Source(of)], draws=40)
        assert "the server merges batches as well" in reason(found, "placement")
        triton = found.settings[0]
        assert "dynamic_batching {" in triton.text


class TestPlacement:
    def test_one_batch_size_cannot_tell(self) -> None:
        found = advised(LARGE)
        assert (found.c1_per_s, found.c2_per_s) == (None, None)
        assert "calibrate -k 1,2,4,8" in reason(found, "placement")

    def test_the_others_with_as_many_clients(self) -> None:
        found = advised(SMALL, LARGE)
        assert found.c1_per_s is not None
        assert found.c1_per_s.mean == pytest.approx(250, rel=0.01)
        assert found.c2_per_s is not None
        assert found.c1_per_s.mean < found.c2_per_s.mean

    def test_the_server_takes_over_where_it_carries_more(self) -> None:
        """A batch of 8 travels for 200 ms, a request for 2: sixteen batches in flight carry 16 x 8 / 210 ms = 610."""
        one = builders.point(1, service_s=0.008, transport_s=0.002)
        eight = builders.point(8, service_s=0.010, transport_s=0.200)
        found = advised(one, eight)
        assert (found.placement, found.k, found.flights, found.p99) == ("C2", 8, 128, None)
        assert found.throughput.mean == pytest.approx(800, rel=0.02)
        assert "dynamic_batching {" in found.settings[0].text
        assert "--placement C2 -k 1 -M 128" in found.settings[2].text
        # With a latency to keep it does not: its own is not predicted.
        assert advised(one, eight, p99_s=1.0).placement == "C4"

    def test_emulated_compute_is_labelled(self) -> None:
        assert advised(LARGE).sentence.endswith(" (emulated compute)")
        real = builders.model_info(compute="real")
        assert not advise([source(LARGE, model=real)], draws=40).sentence.endswith("(emulated compute)")


class TestTransport:
    def test_the_best_of_several(self) -> None:
        slow = source(LARGE, name="slow")
        quick = source(builders.point(transport_s=0.004), transport="shm", name="quick")
        for order in ([slow, quick], [quick, slow]):
            found = advise(order, p99_s=0.028, draws=40)
            assert (found.transport, found.calibration_name) == ("shm", "quick")
            assert reason(found, "transport") == "transport: shm is the best of http, shm"
        assert found.calibration_names == ("quick", "slow")

    def test_the_only_one(self) -> None:
        assert "others are not compared" in reason(advised(LARGE), "transport")


class TestConfidence:
    def test_what_is_certain(self) -> None:
        found = advised(SMALL, LARGE)
        assert (found.confidence, found.confidence_share) == ("high", 1.0)
        assert {each.confidence for each in found.settings} == {"high"}

    def test_a_budget_on_the_edge(self) -> None:
        """M = 2 takes C, 25 ms, give or take 5 % / sqrt(20): a budget just there is met in half of the draws."""
        found = advised(builders.point(spread=0.05), p99_s=0.02501)
        assert found.outcome == "met"
        assert found.confidence == "low"
        assert found.confidence_share == pytest.approx(0.5, abs=0.35)

    def test_none_without_uncertainty(self) -> None:
        found = advised(LARGE.model_copy(update={"blocks": None}))
        assert (found.confidence, found.confidence_share, found.throughput.low) == ("not known", None, None)

    def test_predictors_that_differ_keep_it_from_being_high(self) -> None:
        """S = D, constant: two batches take turns and X(2) = 2 X(1), where by chance they get in each other's way."""
        law = builders.transport_law([100, 100, 100], held_s=1e-12)
        turns = builders.point(service_s=0.010, transport_s=0.010).model_copy(update={"transport_law": law})
        found = advised(turns)
        assert (found.flights, found.confidence, found.confidence_share) == (2, "medium", 1.0)
        assert "mva and simulation differ by 33%" in reason(found, "confidence")

    def test_two_that_change_places(self) -> None:
        noisy = tuple(
            Block(session=0, cycle_s=0.025 * (1 + 0.3 * (-1) ** n), service_s=0.010 * (1 + 0.3 * (-1) ** n))
            for n in range(20)
        )
        rival = builders.point(4, service_s=0.005, transport_s=0.0075).model_copy(
            update={"blocks": tuple(Block(session=0, cycle_s=b.cycle_s / 2, service_s=b.service_s / 2) for b in noisy)}
        )
        found = advised(rival, LARGE.model_copy(update={"blocks": noisy}))
        assert found.confidence != "high"


class TestRefused:
    def test_several_models(self) -> None:
        other = builders.calibration(model=builders.model_info(name="n"))
        with pytest.raises(UsageError, match="advice is for one model: saw 'm, n'"):
            advise([Source(builders.calibration()), Source(other)])

    def test_no_batch_size(self) -> None:
        with pytest.raises(EvidenceError, match="states no batch size with its times"):
            advise([Source(builders.calibration(builders.point(None)))])

    @pytest.mark.parametrize(("p99_s", "rate_per_s"), [(0.0, None), (None, -1.0), (None, float("nan"))])
    def test_no_budget_or_rate(self, p99_s: float | None, rate_per_s: float | None) -> None:
        with pytest.raises(UsageError, match="not a budget or a rate"):
            advise([Source(builders.calibration())], p99_s=p99_s, rate_per_s=rate_per_s)


LINES = {
    "delay, one instance": Line(
        (Station.delay("t"), Station.queue("g")), ("t", "g"), Independent([Gamma(0.015, 0.3), Gamma(0.010, 0.2)]), "g"
    ),
    "shared transport, one instance": Line(
        (Station.flow_equivalent("t", [60, 90, 100]), Station.queue("g")),
        ("t", "g"),
        Independent([Gamma(1.0, 0.4), Constant(0.008)]),
        "g",
    ),
    "shared transport, two instances that slow each other down": Line(
        (Station.flow_equivalent("t", [60, 90]), Station.instances("g", [0.01, 0.015])),
        ("t", "g"),
        Independent([Exponential(1.0), Exponential(0.01)]),
        "g",
    ),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize(("k", "flights"), [(1, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("wait_s", [0.0, 0.004, 0.050, None])
def test_latency_is_that_of_the_policy_itself(line: Line, k: int, flights: int, wait_s: float | None) -> None:
    """Request by request as the reference engine, which runs the batcher that serves; it rounds to nanoseconds."""
    arrivals_s = np.cumsum(np.random.default_rng(7).exponential(0.012, 1_500))
    seed = np.random.SeedSequence(3)
    policy = Policy(k, flights, 10_000, None if wait_s is None else ns_from_s(wait_s))
    reference = Run(Scenario(policy, line, Recorded(tuple(arrivals_s.tolist()))), seed)
    answers_s = reference.advance(10_000).requests_s
    by_arrival = answers_s[np.argsort(answers_s[:, 0], kind="stable")]
    # At the end of recorded arrivals the reference sends what is left at once.
    settled = by_arrival[:, 1] < arrivals_s[-1]
    expected_s = (by_arrival[:, 1] - by_arrival[:, 0])[settled]
    found_s = formed_responses_s(line, k, flights, arrivals_s, wait_s, seed)
    assert settled.sum() > 1_000
    assert found_s[: len(settled)][settled[: len(found_s)]] == pytest.approx(expected_s, abs=1e-6)


def test_batches_that_wait_for_k_differ_from_those_that_do_not() -> None:
    """The control of the one above: the deadline is not ignored."""
    arrivals_s = np.cumsum(np.random.default_rng(7).exponential(0.012, 1_500))
    line, seed = LINES["delay, one instance"], np.random.SeedSequence(3)
    patient, quick = (formed_responses_s(line, 4, 3, arrivals_s, wait_s, seed) for wait_s in (None, 0.0))
    assert patient.mean() > 1.3 * quick.mean()


class TestCommand:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def written(self, *points: CalibrationPoint) -> Calibration:
        of = builders.calibration(*points)
        builders.written(Path(), of)
        return of

    @pytest.mark.parametrize(("takes", "is_said"), [(8, False), (16, True)])
    def test_a_larger_batch_that_was_not_calibrated_is_said(self, capsys: Out, takes: int, is_said: bool) -> None:
        of = builders.calibration(SMALL, LARGE)
        builders.written(Path(), of.model_copy(update={"model": builders.model_info(max_batch_size=takes)}))
        _, out = said(capsys, "advise", "cal.json", "--analytic")
        assert "k = 8, M = " in out.splitlines()[0]
        assert (f"note: k = 8 is the largest that was calibrated, and the model takes {takes}" in out) == is_said

    def test_whole(self, capsys: Out) -> None:
        self.written(*(point.model_copy(update={"blocks": None}) for point in (SMALL, LARGE)))
        code, out = said(capsys, "advise", "cal.json", "--p99", "40ms")
        assert (code, out.splitlines()) == (
            0,
            [
                "batch in the proxy: k = 8, M = 3 over http: expect at most 800 request/s, p99 30 ms (emulated "
                "compute)",
                "  size: k = 8, M = 3 has the best throughput of all settings that fit the budget",
                "  budget: p99 30 ms of 40 ms; 10 ms to spare",
                "  placement: with 24 clients no batching carries 250, the server's own batching 779.6 request/s",
                "  transport: http is the only one that was calibrated; others are not compared",
                "  confidence: not known, as the calibration states no uncertainty",
                "  the instances can compute 800 request/s; what the transport can carry is not known: no transport "
                "law was measured",
                "  mean latency 30 ms",
                "triton (confidence not known): 1 instance, as calibrated, of the kind that it has; it gets "
                "up to 8 requests at once; without dynamic_batching: batches come full from the proxy, and a queue "
                "delay would only hold them up",
                "    max_batch_size: 8",
                "    instance_group [ { count: 1 } ]",
                "ray-serve (confidence not known): k = 8 and M = 3; the first line goes on the class, the second on "
                "its method; with fewer ongoing requests than k (M + 1) the next batch could not form while M fly; "
                "a partial batch goes after one mean cycle: callers who fill all flights never wait for it",
                "    @serve.deployment(max_ongoing_requests=32)",
                "    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.03, max_concurrent_batches=3)",
                "b2g-serve (confidence not known): batches of up to 8, at most 3 in flight; a partial batch goes "
                "after one mean cycle: callers who fill all flights never wait for it",
                "    b2g serve --url http://HOST:8000 --model m -k 8 -M 3 --formation-deadline 30ms --transport http",
                "note: scope: from a request's arrival in the proxy to its answer; what the clients' own way to it "
                "adds is extra",
                "note: load: 24 callers, as many as fill all flights, each asking again as soon as it is answered; "
                "--rate states another",
                "note: no transport law was measured: transport is taken for a pure delay, and throughput is an "
                "upper bound: calibrate with --null-model",
                "note: the compute was emulated",
                "next: b2g predict cal.json -k 8, then b2g measure: hold it to its word",
            ],
        )

    def test_a_budget_that_cannot_be_met_is_exit_1(self, capsys: Out) -> None:
        self.written(LARGE)
        code, out = said(capsys, "advise", "cal.json", "--p99", "1ms")
        assert (code, out.startswith("the budget cannot be met: p99 1 ms asked for, p99 25 ms")) == (1, True)

    def test_one_that_nothing_is_known_about_is_exit_3(self, capsys: Out) -> None:
        self.written(LARGE)
        code, out = said(capsys, "advise", "cal.json", "--p99", "1s", "--analytic")
        assert (code, out.startswith("whether the budget is met is not known without the simulation")) == (3, True)

    def test_json(self, capsys: Out) -> None:
        self.written(LARGE)
        code, out = said(capsys, "advise", "cal.json", "--json", "--analytic")
        found = Advice.model_validate_json(out)
        assert (code, found.k, json.loads(out)["record"]) == (0, 8, "b2g.advice")

    def test_the_settings_are_options_that_there_are(self, capsys: Out) -> None:
        self.written(SMALL, LARGE)
        _, out = said(capsys, "advise", "cal.json", "--json", "--rate", "500")
        (serve,) = [each["text"] for each in json.loads(out)["settings"] if each["where"] == "b2g-serve"]
        assert run(["serve", "--help"]) == 0
        known = capsys.readouterr().out
        options = [word for word in serve.split() if word.startswith("-")]
        assert {"-k", "-M", "--formation-deadline", "--transport"} <= set(options)
        assert [option for option in options if option not in known] == []

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (["--p99", "50"], "--p99: not a time: saw '50'"),
            (["--rate", "0"], "--rate: not a budget or a rate: saw 0.0"),
            (["--rate", "x"], "Invalid value for '--rate'"),
            (["cal.json"], "CALIBRATION: a calibration is named twice"),
            (["missing.json"], "missing.json: cannot read the file"),
        ],
    )
    def test_mistyped(self, capsys: Out, options: list[str], line: str) -> None:
        self.written(LARGE)
        code, seen = complained(capsys, "advise", "cal.json", *options)
        assert code == 2
        assert seen.startswith(line)
