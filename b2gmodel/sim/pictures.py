"""Pictures of simulations: a sweep as lines with their intervals, a run as flights on stations over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from b2gmodel.errors import UsageError
from b2gmodel.sim.reference import Stay
from b2gmodel.sim.sweep import Row
from b2gmodel.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by the colour-blind, too.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
FORMATS: Final = (".png", ".svg", ".pdf")


def draw_sweep(rows: Sequence[Row], axes: Sequence[str], path: Path) -> None:
    """Throughput and response over the last axis, a line for each combination of the others; replaces the file.

    Raises:
        UsageError: another ending than ``FORMATS``, or a folder that cannot be written.
    """
    figure = _new_figure(path, (10.0, 4.2))
    panels = figure.subplots(1, 2)
    *groups, across = axes
    for panel, name, label in zip(
        panels, ("throughput_per_s", "response_s"), ("throughput X, request/s", "mean response, s"), strict=True
    ):
        answered = [row for row in rows if row[name] is not None]
        keys = list(dict.fromkeys(tuple(row[group] for group in groups) for row in answered))
        for number, key in enumerate(keys):
            line = [row for row in answered if tuple(row[group] for group in groups) == key]
            x = [row[across] for row in line]
            colour = _COLOURS[number % len(_COLOURS)]
            said = ", ".join(f"{group} = {value:g}" for group, value in zip(groups, key, strict=True))
            panel.plot(x, [row[name] for row in line], color=colour, marker="o", markersize=4, label=said or None)
            low, high = ([row[f"{name}_{side}"] for row in line] for side in ("low", "high"))
            panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        panel.set_xlabel(across)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        if groups and keys:
            panel.legend(fontsize=8)
    _save(figure, path)


def draw_trace(stays: Sequence[Stay], flights: int, path: Path) -> None:
    """Flights on the stations as a Gantt picture: a row a flight slot, a bar a stay, pale while it waits.

    Raises:
        UsageError: as ``draw_sweep``.
    """
    figure = _new_figure(path, (11.0, 1.2 + 0.4 * flights))
    panel = figure.subplots()
    stations = list(dict.fromkeys(stay.station for stay in stays))
    slots = _slots(stays, flights)
    for number, station in enumerate(stations):
        colour = _COLOURS[number % len(_COLOURS)]
        here = [stay for stay in stays if stay.station == station]
        rows = [slots[stay.flight_id] for stay in here]
        panel.barh(
            rows,
            [1e3 * (stay.begun_s - stay.arrived_s) for stay in here],
            left=[1e3 * stay.arrived_s for stay in here],
            color=colour,
            alpha=0.25,
            height=0.8,
        )
        panel.barh(
            rows,
            [1e3 * (stay.ended_s - stay.begun_s) for stay in here],
            left=[1e3 * stay.begun_s for stay in here],
            color=colour,
            height=0.8,
            edgecolor="white",
            linewidth=0.5,
            label=station,
        )
    panel.set_yticks(range(flights), [str(slot + 1) for slot in range(flights)])
    panel.invert_yaxis()
    panel.set_xlabel("time, ms (pale: waiting)")
    panel.set_ylabel("flight")
    figure.legend(fontsize=8, loc="outside upper right", ncols=len(stations))
    _save(figure, path)


def _slots(stays: Sequence[Stay], flights: int) -> dict[int, int]:
    """A row for each flight number: the first that is free when the flight starts."""
    begin_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for stay in stays:
        begin_s[stay.flight_id] = min(begin_s.get(stay.flight_id, stay.arrived_s), stay.arrived_s)
        end_s[stay.flight_id] = max(end_s.get(stay.flight_id, stay.ended_s), stay.ended_s)
    free_s, slots = [0.0] * flights, {}
    for flight_id in sorted(begin_s):
        slot = next((n for n in range(flights) if free_s[n] <= begin_s[flight_id]), flights - 1)
        free_s[slot] = end_s[flight_id]
        slots[flight_id] = slot
    return slots


def _new_figure(path: Path, size: tuple[float, float]) -> Figure:
    if path.suffix not in FORMATS:
        raise UsageError("not a kind of figure", observed=path.suffix, allowed=", ".join(FORMATS), where=str(path))
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda stream: figure.savefig(stream, format=path.suffix[1:], dpi=150), replace=True)
