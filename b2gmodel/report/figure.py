"""The figure that people know from the study: measured X against M, the predicted M*, the predicted curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from b2gmodel.errors import UsageError
from b2gmodel.measured import measured_baseline, measured_curve
from b2gmodel.records import Measurement, Prediction, PredictorResult
from b2gmodel.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by the colour-blind, too.
_MEASURED: Final = "#0072B2"
_PREDICTED: Final = "#D55E00"
_BOUND: Final = "#009E73"
_BASELINE: Final = "#555555"
_FORMATS: Final = (".png", ".svg", ".pdf")


def draw_throughput(cases: Sequence[tuple[Prediction, Measurement]], path: Path) -> None:
    """One panel a case, written to ``path`` (.png, .svg or .pdf); an existing figure is replaced.

    Raises:
        UsageError: another ending, or a folder that cannot be written.
    """
    if path.suffix not in _FORMATS:
        raise UsageError("not a kind of figure", observed=path.suffix, allowed=", ".join(_FORMATS), where=str(path))
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(cases), 4.2), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for panel, (prediction, measurement) in zip(panels, cases, strict=True):
        _draw_case(panel, prediction, measurement)
    write_atomically(path, lambda stream: figure.savefig(stream, format=path.suffix[1:], dpi=150), replace=True)


def _draw_case(panel: Axes, prediction: Prediction, measurement: Measurement) -> None:
    curve = measured_curve(measurement)
    place, best = prediction.predictors[0], prediction.best
    last = max(point.flights for point in curve)
    _draw_predicted(panel, place, last, _BOUND, "--" if best is not place else "-")
    if best is not place:
        _draw_predicted(panel, best, last, _PREDICTED, "-")
    half_widths = [0.0 if point.interval is None else point.interval.half_width for point in curve]
    panel.errorbar(
        [point.flights for point in curve],
        [point.mean for point in curve],
        yerr=half_widths if any(half_widths) else None,
        color=_MEASURED,
        marker="o",
        capsize=3,
        label="measured, 90 % interval" if any(half_widths) else "measured",
    )
    panel.axvline(place.m_star, color=_BOUND, linestyle="--", label=f"predicted M* = {place.m_star}")
    baseline = measured_baseline(measurement)
    if baseline is not None:
        panel.axhline(baseline, color=_BASELINE, linestyle=":", label="without batching (C1)")
    emulated = ", emulated compute" if prediction.model.compute == "emulated" else ""
    panel.set_title(
        f"{prediction.model.name}, {prediction.payload_bytes / 1024:,.0f} KiB a request{emulated}",
        fontsize=10,
    )
    panel.set_xlabel("batches in flight M")
    panel.set_ylabel("throughput X, request/s")
    panel.set_xticks([point.flights for point in curve])
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8, loc="best")


def _draw_predicted(panel: Axes, predicted: PredictorResult, last: int, colour: str, style: str) -> None:
    promised = [point for point in predicted.curve if point.flights <= last]
    flights = [point.flights for point in promised]
    label = f"predicted ({predicted.name}, {predicted.kind})"
    panel.plot(flights, [point.throughput_per_s for point in promised], style, color=colour, label=label)
    if predicted.level is not None:
        lows = [point.low or point.throughput_per_s for point in promised]
        highs = [point.high or point.throughput_per_s for point in promised]
        panel.fill_between(flights, lows, highs, color=colour, alpha=0.15, linewidth=0)
