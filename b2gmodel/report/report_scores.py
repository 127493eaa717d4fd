"""Tables of what was judged: claims, evidence, heights, and how well each predictor did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from b2gmodel.records import Check, Diagnostic, EvidenceCheck, HeightScore, Measurement, PredictorScore
from b2gmodel.report.report_parts import EMPTY, Cell, Table, estimate, interval, number, outcome, plain, words

SCORED: Final = (
    "Over M > 1, which the calibration did not see, in shares of the measured X(M). CRPS: lower is better; skill is "
    "1 - CRPS / the rival's CRPS, above 0 where it beats the rival. What is fitted saw the answer."
)


def checks_table(checks: Sequence[Check]) -> Table:
    return Table(
        "Claims that were frozen, and what was seen",
        ("outcome", "claim", "predictor", "observed", "bound", "sessions to decide"),
        tuple(
            (outcome(each.outcome), words(each.name), words(each.predictor), words(each.observed), words(each.bound),
             number(each.more_sessions, "d"))
            for each in checks
        ),
        wide=frozenset({"claim", "observed", "bound"}),
    )  # fmt: skip


def evidence_table(evidence: Sequence[EvidenceCheck]) -> Table:
    return Table(
        "Whether the measurement can carry a verdict",
        ("outcome", "check", "observed", "bound"),
        tuple((outcome(each.outcome), words(each.name), words(each.observed), words(each.bound)) for each in evidence),
        wide=frozenset({"check", "observed", "bound"}),
    )


def heights_table(heights: Sequence[HeightScore]) -> Table:
    """A row an M: what was measured, and what each predictor promised there with its signed error."""
    names = list(dict.fromkeys(score.predictor for score in heights))
    by_flights: dict[int, dict[str, HeightScore]] = {}
    for score in heights:
        by_flights.setdefault(score.flights, {})[score.predictor] = score
    rows = []
    for flights, scores in sorted(by_flights.items()):
        one = next(iter(scores.values()))
        measured = interval(one.measured_per_s, one.measured_low, one.measured_high, ".1f")
        rows.append(
            (
                Cell(str(flights), flights),
                Cell(measured, one.measured_per_s),
                *(_promised(scores.get(name)) for name in names),
            )
        )
    return Table(
        "X(M) measured and promised, request/s, with the promise's error",
        ("M", "measured", *(plain(name) for name in names)),
        tuple(rows),
    )


def _promised(score: HeightScore | None) -> Cell:
    if score is None:
        return Cell(EMPTY)
    return Cell(f"{score.predicted_per_s:.1f} ({score.error:+.1%})", score.predicted_per_s)


def scores_table(scores: Sequence[PredictorScore], caption: str) -> Table:
    return Table(
        caption,
        ("predictor", "kind", "points", "regret of its M*", "mean error of X", "90 % interval covers", "interval score",
         "CRPS", "energy score", "skill on twice-instances", "skill on best constant"),
        tuple(
            (
                words(each.predictor),
                words(each.kind),
                number(each.points, "d"),
                number(each.regret, ".1%"),
                number(each.mape, ".1%"),
                _coverage(each),
                number(each.interval_score, ".3f"),
                number(each.crps, ".1%"),
                number(each.energy_score, ".3f"),
                number(each.skill_twice_instances, "+.2f"),
                number(each.skill_constant, "+.2f"),
            )
            for each in scores
        ),
    ).known  # fmt: skip


def _coverage(score: PredictorScore) -> Cell:
    found = score.coverage
    if score.covered is None or found is None:
        return Cell(EMPTY)
    return Cell(f"{score.covered}/{score.points}, {estimate(found, '.0%').text}", found.mean)


def diagnostics_table(diagnostics: Sequence[Diagnostic]) -> Table:
    return Table(
        "Diagnostics",
        ("diagnostic", "observed", "bound", "what it means"),
        tuple(
            (words(each.name), number(each.observed), number(each.bound), words(each.sentence)) for each in diagnostics
        ),
        wide=frozenset({"what it means"}),
    )


def runs_table(of: Measurement) -> Table:
    """Every run as measured, behind the figure's means."""
    return Table(
        "Runs as measured",
        ("session", "placement", "M", "clients", "X, request/s", "mean S, ms", "mean queue, ms", "failed"),
        tuple(
            (
                Cell(str(session), session),
                words(run.placement),
                Cell(str(run.flights), run.flights),
                number(run.concurrency, "d"),
                number(run.throughput_per_s, ".1f"),
                number(None if run.service_s is None else 1e3 * run.service_s, ".3f"),
                number(None if run.queue_s is None else 1e3 * run.queue_s, ".3f"),
                number(run.failed, "d"),
            )
            for session, each in enumerate(of.sessions, start=1)
            for run in each.runs
        ),
        folded=True,
    )
