"""Where to batch, as a picture: the gain of the proxy against payload, R, and maps of payload against speed.

Lines are predicted, marks with intervals are measured. The maps are predicted alone: the laws of each calibrated
payload with its compute, or its transport, some times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from b2gmodel.errors import UsageError
from b2gmodel.laws import Floats
from b2gmodel.placement import PlacementLaws, placement_laws, proxy_gain
from b2gmodel.placement_records import MeasuredCell, StudyVerdict
from b2gmodel.records import Calibration, Estimate
from b2gmodel.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, as in ``figure.py``.
_MEASURED: Final = "#0072B2"
_PREDICTED: Final = "#D55E00"
_FORMATS: Final = (".png", ".svg", ".pdf")
SPEEDS: Final = tuple(2.0 ** (n / 2) for n in range(-4, 7))
_KIB: Final = 1024


def draw_placements(verdict: StudyVerdict, calibrations: Mapping[str, Calibration], path: Path) -> None:
    """Four panels for the setting with the most payloads (of several, that with most clients), written to ``path``.

    Args:
        calibrations: by workload.

    Raises:
        UsageError: another ending, a folder that cannot be written, or a study of one payload.
    """
    if path.suffix not in _FORMATS:
        raise UsageError("not a kind of figure", observed=path.suffix, allowed=", ".join(_FORMATS), where=str(path))
    cells = shown_cells(verdict)
    if len(cells) < 2:
        raise UsageError("a figure against payload needs two payloads", observed=len(cells), where=str(path))
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "b2gmodel"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 8.2), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    draw_gain(panels[0], verdict, cells)
    draw_ratio(panels[1], cells)
    draw_map(panels[2], cells, calibrations, PlacementLaws.faster_compute, "compute")
    draw_map(panels[3], cells, calibrations, PlacementLaws.faster_link, "link")
    emulated = any(calibrations[cell.workload].model.compute == "emulated" for cell in cells)
    figure.suptitle(
        f"batches of {cells[0].k} in the proxy, {cells[0].concurrency} clients, {cells[0].transport}"
        + (", emulated compute" if emulated else ""),
        fontsize=10,
    )
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    write_atomically(
        path,
        lambda stream: figure.savefig(stream, format=path.suffix[1:], dpi=150, metadata=metadata),
        replace=True,
    )


def regime_map(
    calibrations: Sequence[Calibration],
    k: int,
    concurrency: int,
    faster: Callable[[PlacementLaws, float], PlacementLaws],
    speeds: Sequence[float],
) -> Floats:
    """X_C3 / X_C1 - 1 with each ``faster`` by each of ``speeds``, shape ``[speeds, calibrations]``."""
    laws = [placement_laws(calibration, k, draws=0) for calibration in calibrations]
    gains = [[proxy_gain(faster(each, speed), concurrency) for each in laws] for speed in speeds]
    return np.array(gains)


def shown_cells(verdict: StudyVerdict) -> list[MeasuredCell]:
    """The setting with the most payloads (of several, that with most clients), by payload."""
    groups: dict[tuple[str, int, int], dict[int, MeasuredCell]] = {}
    for cell in verdict.cells:
        groups.setdefault((cell.transport, cell.k, cell.concurrency), {})[cell.payload_bytes] = cell
    best = max(groups, key=lambda setting: (len(groups[setting]), setting[2]))
    return [groups[best][size] for size in sorted(groups[best])]


def draw_gain(panel: Axes, verdict: StudyVerdict, cells: Sequence[MeasuredCell]) -> None:
    """What the proxy gains against payload, with the crossover."""
    at = [cell.payload_bytes / _KIB for cell in cells]
    promised = [(x, cell.predicted.gain) for x, cell in zip(at, cells, strict=True) if cell.predicted is not None]
    _line(panel, promised, "predicted before")
    _marks(panel, [(x, cell.gain) for x, cell in zip(at, cells, strict=True)])
    draw_crossovers(panel, verdict, cells)
    _dress(panel, "X_C3 / X_C1 - 1", "what batching in a single-flight proxy gains")


def draw_crossovers(panel: Axes, verdict: StudyVerdict, cells: Sequence[MeasuredCell]) -> None:
    """The payload above which the proxy's batching loses, with its interval: predicted and measured."""
    setting = (cells[0].transport, cells[0].k, cells[0].concurrency)
    for each in verdict.crossovers:
        if (each.predicted.transport, each.predicted.k, each.predicted.concurrency) == setting:
            _band(panel, each.predicted.payload_bytes, _PREDICTED, "crossover, predicted")
            _band(panel, each.measured.payload_bytes, _MEASURED, "crossover, measured")
    # A limit that lies far beyond the ladder would squeeze all else.
    panel.set_xlim(cells[0].payload_bytes / _KIB / 1.1, cells[-1].payload_bytes / _KIB * 1.1)


def draw_ratio(panel: Axes, cells: Sequence[MeasuredCell]) -> None:
    """R against payload; where it is undefined, a cross."""
    at = [cell.payload_bytes / _KIB for cell in cells]
    promised = [
        (x, cell.predicted.ratio)
        for x, cell in zip(at, cells, strict=True)
        if cell.predicted is not None and cell.predicted.ratio is not None
    ]
    _line(panel, promised, "predicted before")
    _marks(panel, [(x, cell.ratio) for x, cell in zip(at, cells, strict=True) if cell.ratio is not None])
    undefined = [x for x, cell in zip(at, cells, strict=True) if cell.ratio is None]
    if undefined:
        panel.plot(undefined, [0.0] * len(undefined), "x", color=_MEASURED, label="undefined as measured")
    _dress(panel, "R = (X_C3 - X_C1) / (X_C2 - X_C1)", "its share of what the server's own batching gains")


def draw_map(
    panel: Axes,
    cells: Sequence[MeasuredCell],
    calibrations: Mapping[str, Calibration],
    faster: Callable[[PlacementLaws, float], PlacementLaws],
    what: str,
) -> None:
    """The regime map: the predicted gain against payload and speed of ``what``."""
    at = [cell.payload_bytes / _KIB for cell in cells]
    own = [calibrations[cell.workload] for cell in cells]
    gains = regime_map(own, cells[0].k, cells[0].concurrency, faster, SPEEDS)
    most = float(np.abs(gains).max())
    shades = panel.contourf(at, SPEEDS, gains, levels=np.linspace(-most, most, 13), cmap="PuOr_r")
    panel.contour(at, SPEEDS, gains, levels=[0.0], colors="black", linewidths=1.5)
    panel.figure.colorbar(shades, ax=panel, label="X_C3 / X_C1 - 1, predicted", format="%+.1f")
    for marker, wins, label in (("^", True, "measured: the proxy gains"), ("v", False, "measured: it loses")):
        xs = [x for x, cell in zip(at, cells, strict=True) if (cell.gain.mean > 0) is wins]
        if xs:  # an empty line that is not clipped would count as lying in the figure's corner
            panel.plot(xs, [1.0] * len(xs), marker, color="black", markerfacecolor="white", clip_on=False, label=label)
    _dress(panel, f"{what} speed, times this server's", "where to batch: above 0 in the proxy, below 0 not there")
    panel.set_yscale("log", base=2)
    panel.set_ylim(SPEEDS[0], SPEEDS[-1])
    panel.yaxis.set_major_formatter("{x:g}")


def _line(panel: Axes, points: Sequence[tuple[float, Estimate]], label: str) -> None:
    xs = [x for x, _ in points]
    panel.plot(xs, [found.mean for _, found in points], "-", color=_PREDICTED, label=label)
    lows = [found.mean if found.low is None else found.low for _, found in points]
    highs = [found.mean if found.high is None else found.high for _, found in points]
    panel.fill_between(xs, lows, highs, color=_PREDICTED, alpha=0.15, linewidth=0)


def _marks(panel: Axes, points: Sequence[tuple[float, Estimate]]) -> None:
    below = [0.0 if found.low is None else found.mean - found.low for _, found in points]
    above = [0.0 if found.high is None else found.high - found.mean for _, found in points]
    panel.errorbar(
        [x for x, _ in points],
        [found.mean for _, found in points],
        yerr=[below, above],
        fmt="o",
        color=_MEASURED,
        capsize=3,
        label="measured, 90 % interval",
    )


def _band(panel: Axes, where: Estimate | None, colour: str, label: str) -> None:
    if where is None:
        return
    panel.axvline(where.mean / _KIB, color=colour, linestyle="--", linewidth=1, label=label)
    if where.low is not None and where.high is not None:
        panel.axvspan(where.low / _KIB, where.high / _KIB, color=colour, alpha=0.08, linewidth=0)


def _dress(panel: Axes, label: str, title: str) -> None:
    panel.axhline(0.0, color="#555555", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("payload of a request, KiB")
    panel.xaxis.set_major_formatter("{x:.6g}")  # short also where an axis runs over many powers
    panel.set_ylabel(label)
    panel.set_title(title, fontsize=9)
    panel.legend(fontsize=7, loc="best")
