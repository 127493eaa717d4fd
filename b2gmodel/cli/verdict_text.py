"""A verdict as text: the answer, a line a check with what was seen and its bound, the figures, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from b2gmodel.cli.output import say, table

if TYPE_CHECKING:
    from b2gmodel.records import Estimate, HeightScore, PlacementScore, Prediction, PredictorScore, Verdict

_FEW_SESSIONS: Final = 8
"""From fewer, how many would decide is a guess: their spread is not known."""


def say_verdict(verdict: Verdict, prediction: Prediction, predictions: Path, figure: Path | None) -> None:
    """The verdict in the order of the design: the answer, a line a check, the figures, what to do next.

    Args:
        prediction: that was judged.
        predictions: the folder of its ledger; its calibration should be in ``calibration`` beside it.
    """
    from b2gmodel.scores import CONSTANT, USL

    say(f"{verdict.outcome}: {verdict.sentence}")
    for check in verdict.checks:
        say(f"  {check.outcome:<12}  {check.name} ({check.predictor}): {check.observed}; bound: {check.bound}")
    for proof in verdict.evidence:
        say(f"  {proof.outcome:<12}  {proof.name}: {proof.observed}; bound: {proof.bound}")
    say(_heights_table(verdict))
    if verdict.scores:
        say(scores_table(verdict.scores))
        say("note: scores are over M > 1, in shares of the measured X(M); skill is in CRPS")
    fitted = {score.predictor for score in verdict.scores} & {USL, CONSTANT}
    if fitted:
        say(f"note: {' and '.join(sorted(fitted))} saw the answer: fitted to this very measurement")
    if verdict.placement is not None:
        say(f"placement at {verdict.placement.concurrency} clients: {_placement(verdict.placement)}")
    for diagnostic in verdict.diagnostics:
        say(f"diagnostic {diagnostic.name}: {diagnostic.sentence}")
    if verdict.baseline_per_s is not None:
        say(f"without batching (C1): {verdict.baseline_per_s:.1f} request/s")
    if not verdict.preregistered:
        say("note: not pre-registered: these figures were measured before the prediction was made")
    if figure is not None:
        say(f"figure: {figure}")
    say(f"next: {_advice(verdict, prediction, predictions)}")


def _heights_table(verdict: Verdict) -> str:
    """A row an M: what was measured, and what each predictor promised there with its signed error."""
    names = list(dict.fromkeys(score.predictor for score in verdict.heights))
    by_flights: dict[int, dict[str, HeightScore]] = {}
    for score in verdict.heights:
        by_flights.setdefault(score.flights, {})[score.predictor] = score
    rows = []
    for flights, scores in sorted(by_flights.items()):
        one = next(iter(scores.values()))
        cells = [f"  {flights}", f"{one.measured_per_s:.1f}", _or_dash(one.measured_low), _or_dash(one.measured_high)]
        cells += [f"{scores[name].predicted_per_s:.1f} ({scores[name].error:+.1%})" for name in names]
        rows.append(tuple(cells))
    return table(rows, ("  M", "measured/s", "low 90 %", "high 90 %", *names))


def scores_table(scores: Sequence[PredictorScore]) -> str:
    """A row a predictor; the interval of the coverage is Clopper and Pearson's."""
    rows = [
        (
            f"  {score.predictor}",
            _or_dash(score.mape, ".1%"),
            _coverage(score),
            _or_dash(score.crps, ".1%"),
            _or_dash(score.skill_twice_instances, "+.2f"),
            _or_dash(score.skill_constant, "+.2f"),
        )
        for score in scores
    ]
    return table(
        rows, ("  predictor", "MAPE", "90 % interval covers", "CRPS", "skill on twice-instances", "on best constant")
    )


def _coverage(score: PredictorScore) -> str:
    found = score.coverage
    if score.covered is None or found is None or found.low is None or found.high is None:
        return "-"
    return f"{score.covered}/{score.points} [{found.low:.0%}, {found.high:.0%}]"


def _placement(found: PlacementScore) -> str:
    gain = f"X_C3 / X_C1 - 1 = {_estimate(found.gain, '+.1%')}"
    ratio = f"undefined, {found.undefined}" if found.ratio is None else _estimate(found.ratio, ".2f")
    return f"R = {ratio}; {gain}"


def _estimate(found: Estimate, form: str) -> str:
    text = format(found.mean, form)
    return text if found.low is None or found.high is None else f"{text} [{found.low:{form}}, {found.high:{form}}]"


def _or_dash(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _advice(verdict: Verdict, prediction: Prediction, predictions: Path) -> str:
    if verdict.outcome == "invalid":
        return "mend what failed, and measure the frozen prediction again: b2g measure"
    place = verdict.checks[0]
    if place.outcome == "refuted":
        peak = f"set M = {verdict.best_flights}, where the measured peak is"
        return f"{peak}, and look for what {place.predictor} leaves out"
    if verdict.outcome == "inconclusive":
        more = max(check.more_sessions or 0 for check in verdict.checks)
        wanted = verdict.sessions + more if more else 2 * verdict.sessions
        why = "" if wanted >= _FEW_SESSIONS else f" ({verdict.sessions} are too few to say how many)"
        again = _predict_again(prediction, predictions, max(wanted, _FEW_SESSIONS))
        return f"measure more sessions{why}: {again}, then b2g measure what it froze"
    if verdict.outcome == "refuted":
        return f"set M = {verdict.m_star} in your proxy, and plan on what was measured there, not on what was predicted"
    return f"set M = {verdict.m_star} in your proxy"


def _predict_again(prediction: Prediction, predictions: Path, sessions: int) -> str:
    """The command that freezes the same prediction with a plan of so many sessions."""
    from b2gmodel.units import format_duration

    calibration = predictions.parent / "calibration" / f"{prediction.calibration_name}.json"
    known = shlex.quote(str(calibration)) if calibration.exists() else "CALIBRATION"
    size = "" if prediction.k is None else f" -k {prediction.k}"
    flights = ",".join(map(str, prediction.plan.flights))
    seconds = format_duration(prediction.plan.seconds_per_run).replace(" ", "")
    ledger = "" if predictions == Path("predictions") else f" --predictions {shlex.quote(str(predictions))}"
    return f"b2g predict {known}{size} --flights {flights} --sessions {sessions} --seconds {seconds}{ledger}"
