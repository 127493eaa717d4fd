"""The report's figures: throughput against batches in flight, and where a cycle's time goes.

Okabe and Ito's palette, and never colour alone: each predictor has its own marker and dashes, each leg its own name or
hatch. Rules here: figures are drawn from records alone, and their text is small and short, as a phone shows them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from b2gmodel.measured import measured_baseline, measured_curve
from b2gmodel.records import CalibrationPoint, LegTimes, Measurement, Prediction, PredictorResult
from b2gmodel.report.report_parts import payload, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED: Final = "#0072B2"
PREDICTED: Final = "#D55E00"
BOUND: Final = "#009E73"
BASELINE: Final = "#555555"
# Of the predictors beside the best one and the bound: colour, marker, dashes.
_OTHERS: Final = (("#CC79A7", "s", "-."), ("#8A6A00", "D", ":"), ("#56B4E9", "^", (0, (5, 1, 1, 1))))

LEGS: Final[Mapping[str, tuple[str, str]]] = {
    "pack_s": ("pack", "proxy"),
    "send_s": ("send", "transport"),
    "server_receive_s": ("server receive", "transport"),
    "unsplit_s": ("receive and return, not told apart", "transport"),
    "queue_s": ("queue", "queue"),
    "compute_input_s": ("compute input", "service"),
    "compute_infer_s": ("compute infer", "service"),
    "compute_output_s": ("compute output", "service"),
    "return_s": ("return", "transport"),
    "deliver_s": ("deliver", "proxy"),
    "residual_s": ("residual", "proxy"),
}
"""The legs in the order in which a batch passes them: what each is called, and what it is part of."""

GROUPS: Final[Mapping[str, tuple[str, str]]] = {
    "proxy": ("#009E73", "\\\\\\"),
    "transport": ("#56B4E9", ""),
    "queue": ("#CC79A7", "xx"),
    "service": ("#E69F00", "///"),
}
"""Colour and hatch of each part of a cycle; ``service`` is S."""


def draw_throughput(figure: Figure, prediction: Prediction, measurement: Measurement | None) -> None:
    """X(M): measured with intervals, each predictor's curve, M* as a line, the bounds as a band."""
    panel = figure.subplots()
    curve = () if measurement is None else measured_curve(measurement)
    last = max((point.flights for point in curve), default=max(prediction.plan.flights))
    place, best = prediction.predictors[0], prediction.best
    others = iter(_OTHERS * len(prediction.predictors))
    for result in prediction.predictors:
        if result.kind == "bounds":
            _fill(panel, result, last, "#BBBBBB", 0.35, _short(result.name))
        elif result is best:
            _line(panel, result, last, PREDICTED, "v", "-")
            _fill(panel, result, last, PREDICTED, 0.15)
        elif result is place:
            _line(panel, result, last, BOUND, "", "--")
        elif result.kind != "rival":
            _line(panel, result, last, *next(others))
    if curve:
        panel.errorbar(
            [point.flights for point in curve],
            [point.mean for point in curve],
            yerr=[0.0 if point.interval is None else point.interval.half_width for point in curve],
            color=MEASURED,
            marker="o",
            markersize=5,
            capsize=3,
            zorder=5,
            label="measured, 90 %" if any(point.interval for point in curve) else "measured",
        )
    panel.axvline(place.m_star, color=BOUND, linestyle=(0, (1, 1)), linewidth=1.5, label=f"M* = {place.m_star}")
    baseline = None if measurement is None else measured_baseline(measurement)
    if baseline is not None:
        panel.axhline(baseline, color=BASELINE, linestyle=":", linewidth=1, label="no batching (C1)")
    panel.set_xlabel("batches in flight M")
    panel.set_ylabel("throughput X, request/s")
    panel.set_xticks(sorted({point.flights for point in curve} or set(prediction.plan.flights)))
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _short(name: str) -> str:
    """A name that fits a legend; the figure's table has it whole."""
    return textwrap.shorten(plain(name), 24, placeholder="…") if len(name) > 24 else plain(name)


def _within(result: PredictorResult, last: int) -> list[tuple[int, float, float, float]]:
    """M, X and its limits up to the last M that is shown."""
    return [
        (each.flights, each.throughput_per_s, each.low or each.throughput_per_s, each.high or each.throughput_per_s)
        for each in result.curve
        if each.flights <= last
    ]


def _line(panel: Axes, result: PredictorResult, last: int, colour: str, marker: str, dashes: object) -> None:
    found = _within(result, last)
    panel.plot(
        [at for at, *_ in found],
        [mean for _, mean, *_ in found],
        color=colour,
        marker=marker,
        markersize=4,
        linestyle=dashes,
        linewidth=1.3,
        label=_short(result.name) + (", at most" if result.kind == "upper bound" else ""),
    )


def _fill(panel: Axes, result: PredictorResult, last: int, colour: str, alpha: float, label: str = "") -> None:
    found = _within(result, last)
    panel.fill_between(
        [at for at, *_ in found],
        [low for *_, low, _ in found],
        [high for *_, high in found],
        color=colour,
        alpha=alpha,
        linewidth=0,
        label=label or "_nolegend_",
    )


def legs_of(point: CalibrationPoint) -> list[tuple[str, str, float]]:
    """Name, part and seconds of each leg that is known, in order; S and D alone where no legs were taken."""
    legs = point.legs
    if legs is not None:
        return [(name, group, value) for leg, (name, group) in LEGS.items() if (value := _leg(legs, leg)) is not None]
    if point.service_s is not None and point.transport_s is not None:
        return [("transport overhead D", "transport", point.transport_s.mean),
                ("service time S", "service", point.service_s.mean)]  # fmt: skip
    return []


def _leg(legs: LegTimes, name: str) -> float | None:
    value: float | None = getattr(legs, name)
    return None if name == "residual_s" and not value else value


def draw_legs(figure: Figure, legs: Sequence[tuple[str, str, float]]) -> None:
    """One cycle: all of it as a stacked bar, and below it each leg by its name, where it begins and ends."""
    panel = figure.subplots()
    whole_s = sum(value for *_, value in legs)
    begin_s = 0.0
    for row, (_, group, value) in enumerate(legs, start=1):
        colour, hatch = GROUPS[group]
        for at in (0, row):
            panel.barh(at, 1e3 * value, left=1e3 * begin_s, color=colour, hatch=hatch, edgecolor="white", height=0.75)
        _name_length(panel, row, sorted((begin_s / whole_s, (begin_s + value) / whole_s)), value, whole_s)
        begin_s += value
    panel.set_yticks(range(len(legs) + 1), ["cycle", *(plain(name) for name, *_ in legs)])
    panel.invert_yaxis()
    panel.set_xlabel("ms since the batch was sealed\n(S: orange and hatched, D: the rest)")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _name_length(panel: Axes, row: int, ends: Sequence[float], value: float, whole_s: float) -> None:
    """Write a leg's length beside its bar, or on it where there is no room on either side.

    Args:
        ends: where the bar begins and ends, as shares of the cycle.
    """
    begin, end = ends
    at, side, apart = (begin + end) / 2, "center", 0
    if end < 0.65:
        at, side, apart = end, "left", 3
    elif begin > 0.35:
        at, side, apart = begin, "right", -3
    panel.annotate(
        f"{1e3 * value:.3g} ms, {value / whole_s:.0%}",
        (1e3 * whole_s * at, row),
        xytext=(apart, 0),
        textcoords="offset points",
        va="center",
        ha=side,
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5} if side == "center" else None,
    )


def draw_legs_by_payload(figure: Figure, points: Sequence[CalibrationPoint]) -> None:
    """A stacked bar a payload: what part of the cycle is the proxy's, the transport's, the queue's and the model's."""
    panel = figure.subplots()
    for row, point in enumerate(points):
        begin_ms = 0.0
        for group, (colour, hatch) in GROUPS.items():
            value_ms = 1e3 * sum(value for _, of, value in legs_of(point) if of == group)
            label = {"service": "service S"}.get(group, group) if row == 0 else "_nolegend_"
            panel.barh(row, value_ms, left=begin_ms, color=colour, hatch=hatch, edgecolor="white", label=label)
            begin_ms += value_ms
    panel.set_yticks(range(len(points)), [payload(point.payload_bytes) for point in points])
    panel.invert_yaxis()
    panel.set_xlabel("time of a cycle, ms")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
