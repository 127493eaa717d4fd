"""The page and the figure of the published sweeps: scores in, Markdown and a picture out.

Rules here: every number on the page is computed from the file of sweeps; no clock, so the same file gives the same
page, byte for byte.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Final

from b2gmodel.prediction import REGRET_BOUND
from b2gmodel.predictors import CLOSED_FORM, MVA, TWICE_INSTANCES
from b2gmodel.report.sweeps import HEIGHT_BOUND, NEAR_PEAK, Near, Score, Sweep, Sweeps, missing, percent, reasons, score
from b2gmodel.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND: Final = "python calibration/public/make.py"

# Okabe and Ito's palette, and a marker each: told apart by the colour-blind, and in black and white.
_STYLES: Final = {
    False: ("dynamic batching off", "#0072B2", "o"),
    None: ("dynamic batching not stated", "#009E73", "s"),
    True: ("dynamic batching on", "#D55E00", "^"),
}
OFF: Final = "off, one instance"
_CALM: Final = 0.02

_TITLE: Final = f"""# Published sweeps of real servers

`{COMMAND}` writes this page and its figure from
[`calibration/public/public_sweeps.json`](../calibration/public/public_sweeps.json); `--check` says whether the page is
still what the command makes.
"""

_METHOD: Final = f"""
Others have measured throughput against concurrency on real servers, most of them with GPUs. Of each sweep the
prediction sees one row, concurrency 1: C is its mean latency, and S its compute input, infer and output (or the one
lump that the source states). All other rows are kept back, and compared with it afterwards.

- **M\\*** is the closed form's. *Regret* is the share of the measured peak that is lost at M\\*. Nothing is
  interpolated: where M\\* was not measured, the nearest measured M on each side is shown in its place.
- **Height** is the closed form at the M of the measured peak; its error is predicted over measured - 1. No sweep has a
  transport law, so transport is taken for a pure delay and every height is labelled an upper bound.
- The place *holds* with a regret of at most {percent(REGRET_BOUND, 0)}.
- The height *holds* with an error of at most {percent(HEIGHT_BOUND, 0)}.
- The peak is the highest of the stated figures, each of which may be off by some 2 %.
- With the server's dynamic batching on, the closed form does not apply. Those sweeps show what then happens.

![Predicted against measured peak](public-sweeps.svg)
"""


def score_all(sweeps: Sweeps) -> list[Score]:
    """The sweeps whose row at concurrency 1 states C and S, scored, in the file's order."""
    return [score(sweep) for sweep in sweeps.sweeps if missing(sweep) is None]


def page(sweeps: Sweeps) -> str:
    """The whole page, Markdown."""
    scores = score_all(sweeps)
    parts = [
        _TITLE,
        _METHOD,
        "\n## Summary\n",
        _summary(scores),
        "\n## Each sweep\n",
        _results(scores),
        _left_out(sweeps),
        "\n## Which break, and why\n",
        _why(scores),
        "\n## What went in, and the other predictors\n",
        _details(scores),
        "\n## Sources\n",
        _sources(scores),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def group(sweep: Sweep) -> str:
    """What a sweep is summed up with."""
    if sweep.dynamic_batching is None:
        return "dynamic batching not stated"
    if sweep.dynamic_batching:
        return "dynamic batching on" if sweep.colocated is not False else "dynamic batching on, remote client"
    return OFF if sweep.instances == 1 else "off, several instances"


def _groups(scores: Sequence[Score]) -> dict[str, list[Score]]:
    names = sorted({group(each.sweep) for each in scores}, key=lambda name: (not name.startswith("off"), name))
    return {name: [each for each in scores if group(each.sweep) == name] for name in names}


def _summary(scores: Sequence[Score]) -> str:
    rows = []
    for name, members in _groups(scores).items():
        beyond = [abs(error) for each in members for error in each.errors_beyond_one]
        places = [each.is_place_held for each in members if each.is_place_held is not None]
        rows.append(
            (
                name,
                str(len(members)),
                f"{sum(places)} of {len(places)}",
                f"{sum(each.is_height_held for each in members)} of {len(members)}",
                *(percent(median(_at_peak(each, p) for each in members)) for p in (CLOSED_FORM, MVA, TWICE_INSTANCES)),
                f"{percent(mean(beyond))} ({percent(max(beyond))})",
            )
        )
    head = (
        "group",
        "sweeps",
        "place holds",
        "height holds",
        "median error at the peak: closed form",
        "mva",
        "twice instances",
        "closed form at all M > 1: mean (worst)",
    )
    return _table(head, rows) + "\n" + _findings(scores)


def _findings(scores: Sequence[Score]) -> str:
    """What the sweeps say, in sentences; every number is counted here."""
    off = [each for each in scores if group(each.sweep) == OFF]
    errors = [error for each in off for error in each.errors_beyond_one]
    systems = {(each.sweep.model, each.sweep.hardware) for each in off}
    on = [each for each in scores if each.sweep.dynamic_batching]
    beside = [each for each in on if each.sweep.colocated is not False]
    remote = [each for each in on if each.sweep.colocated is False]
    plain = [each for each in scores if not each.sweep.dynamic_batching]
    above = [each for each in plain if each.peak_error < -_CALM]
    above_mva = [each for each in plain if each.errors[MVA][each.sweep.peak.concurrency] < -_CALM]
    differ = [each for each in scores if each.m_star != each.at_twice.flights]
    apart = [
        f"`{each.sweep.id}`, regret {_near(each.at_m_star)} at M\\* = {each.m_star} and {_near(each.at_twice)} at "
        f"M = {each.at_twice.flights}"
        for each in differ
        if each in plain
    ]
    single = [each for each in plain if each.sweep.instances == 1]
    lines = [
        f"- **One instance, dynamic batching off** ({len(off)} sweeps of {len(systems)} systems, {len(errors)} points "
        f"beyond M = 1): the closed form is wrong by {percent(mean(map(abs, errors)))} on average, and M\\* loses at "
        f"most {percent(max(each.at_m_star.regret or 0.0 for each in off))} of the peak.",
        f"- **Dynamic batching on, client beside the server** ({len(beside)} sweeps): the peak lies beyond M\\* in "
        f"{sum(each.sweep.peak.concurrency > each.m_star for each in beside)}; in "
        f"{sum(each.smallest_near > each.m_star for each in beside)} every measured M up to M\\* is more than "
        f"{percent(NEAR_PEAK, 0)} below it.",
        f"- **Dynamic batching on, remote client** ({len(remote)} sweeps): M\\* lies beyond the last measured M in "
        f"{sum(each.at_m_star.high is None for each in remote)}, and the height is overstated in "
        f"{sum(each.peak_error > HEIGHT_BOUND for each in remote)}. Their D/S is "
        f"{min(map(_ratio, remote)):.0f} or more.",
        f"- **The upper bound is not always one.** Where dynamic batching is not on, the measured peak lies more than "
        f"{percent(_CALM, 0)} above the closed form in {len(above)} of {len(plain)} sweeps ({_names(above)}), as S "
        f"under load is shorter than S alone. Above `mva`, which takes exponential service, it lies in "
        f"{len(above_mva)} ({_names(above_mva)}).",
        f"- **M = 2 g**, the rule of thumb, names the M of the closed form in {len(scores) - len(differ)} of "
        f"{len(scores)} sweeps. Where it does not and dynamic batching is not on: {'; '.join(apart)}. These sweeps do "
        "not tell the two rules apart.",
        f"- **Not tested here.** With one instance and dynamic batching not on, D/S is at most "
        f"{max(map(_ratio, single)):.2f} and M\\* at most "
        f"{max(each.m_star for each in single)}: any M from there on would do as well. Large D on a link of its own, "
        "where M\\* says the most, was not among the published sweeps.",
        f"- X(1) = k/C agrees with the stated throughput within "
        f"{percent(max(abs(each.errors[CLOSED_FORM][1]) for each in scores))} in every sweep.",
    ]
    return "\n".join(["", *map(_wrapped, lines)])


def _results(scores: Sequence[Score]) -> str:
    rows = [
        (
            str(number),
            f"`{each.sweep.id}`",
            _batching(each.sweep),
            str(each.m_star),
            str(each.smallest_near),
            _near(each.at_m_star),
            f"{each.height_per_s:.4g}",
            f"{each.sweep.peak.throughput_infer_per_s:.4g} at M = {each.sweep.peak.concurrency}",
            percent(each.peak_error, sign="+"),
            _word(each.is_place_held),
            _word(each.is_height_held),
        )
        for number, each in enumerate(scores, 1)
    ]
    head = (
        "#",
        "sweep",
        "dynamic batching",
        "M\\*",
        f"smallest M within {percent(NEAR_PEAK, 0)} of the peak",
        "regret at M\\*",
        "predicted height, request/s",
        "measured peak, request/s",
        "error",
        "place",
        "height",
    )
    return _table(head, rows)


def _left_out(sweeps: Sweeps) -> str:
    lacking = [(sweep.id, lack) for sweep in sweeps.sweeps if (lack := missing(sweep)) is not None]
    lines = [f"Not predicted: {', '.join(f'`{name}` ({lack})' for name, lack in lacking)}."] if lacking else []
    lines.append(
        f"Nor are the {len(sweeps.throughput_only)} sweeps that state throughput and latency alone: without S at "
        "concurrency 1 there is no M\\*."
    )
    return "\n" + _wrapped(" ".join(lines))


def _why(scores: Sequence[Score]) -> str:
    intro = (
        "The evidence is that of each sweep's own later rows, which no prediction has seen. Requests in service at "
        "once are X S / g: more than one on an instance were merged, as the server books the whole of an execution to "
        "each of its requests. S grows where several instances share a device, and S alone can be longer than S under "
        "load where a device slows down in the gaps between lone requests."
    )
    lines = [_wrapped(intro), ""]
    for each in scores:
        broken = [
            name for name, held in (("place", each.is_place_held), ("height", each.is_height_held)) if held is False
        ]
        verdict = f"{' and '.join(broken)} {'break' if len(broken) > 1 else 'breaks'}" if broken else "holds"
        if each.is_place_held is None:
            verdict += ", M\\* was not measured"
        why = "; ".join(reasons(each)) or "nothing in the later rows speaks against it"
        lines.append(_wrapped(f"- `{each.sweep.id}`: **{verdict}**. {why[0].upper()}{why[1:]}."))
    return "\n".join(lines)


def _details(scores: Sequence[Score]) -> str:
    rows = []
    for number, each in enumerate(scores, 1):
        cycle_s, service_s = _cycle_s(each), _service_s(each)
        peak = each.sweep.peak.concurrency
        rows.append(
            (
                str(number),
                f"{each.sweep.instances or 'not stated'}{' (inferred)' if each.sweep.instances_inferred else ''}",
                f"{cycle_s * 1e3:.4g}",
                f"{service_s * 1e3:.4g}",
                f"{_ratio(each):.2g}",
                percent(each.errors[CLOSED_FORM][1], sign="+"),
                percent(each.errors[MVA][peak], sign="+"),
                str(each.at_twice.flights),
                _near(each.at_twice),
                percent(each.errors[TWICE_INSTANCES][peak], sign="+"),
            )
        )
    head = (
        "#",
        "instances g",
        "C, ms",
        "S, ms",
        "D/S",
        "error of X(1) = k/C",
        "`mva`: error at the peak",
        "M = 2 g",
        "its regret",
        "its error at the peak",
    )
    return _table(head, rows)


def _sources(scores: Sequence[Score]) -> str:
    rows = [
        (
            str(number),
            each.sweep.model,
            each.sweep.hardware or "not stated",
            each.sweep.tool,
            f"`{each.sweep.source}`",
            each.sweep.notes or "-",
        )
        for number, each in enumerate(scores, 1)
    ]
    return _table(("#", "model", "hardware", "client", "source", "notes on the source"), rows)


def draw_peaks(scores: Sequence[Score], path: Path) -> None:
    """Predicted against measured peak, written to ``path`` as SVG; an existing figure is replaced."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    draw_panel(figure.subplots(), scores)
    with mpl.rc_context({"svg.hashsalt": COMMAND, "svg.fonttype": "none"}):
        write_atomically(
            path, lambda stream: figure.savefig(stream, format="svg", metadata={"Date": None}), replace=True
        )


def draw_panel(panel: Axes, scores: Sequence[Score]) -> None:
    """The figure's one panel: a point a sweep with its number, hollow where several instances share the device."""
    for batching, (label, colour, marker) in _STYLES.items():
        for is_one, detail in ((True, ""), (False, ", several instances")):
            members = [
                each
                for each in scores
                if each.sweep.dynamic_batching is batching and ((each.sweep.instances or 1) == 1) is is_one
            ]
            if members:
                panel.plot(
                    [each.sweep.peak.throughput_infer_per_s for each in members],
                    [each.height_per_s for each in members],
                    linestyle="none",
                    marker=marker,
                    color=colour,
                    markerfacecolor=colour if is_one else "white",
                    label=label + detail,
                )
    for number, each in enumerate(scores, 1):
        place = (each.sweep.peak.throughput_infer_per_s, each.height_per_s)
        is_left = number % 2 == 0
        panel.annotate(
            str(number),
            place,
            xytext=(-5, 4) if is_left else (5, -7),
            textcoords="offset points",
            ha="right" if is_left else "left",
            fontsize=7,
        )
    ends = [value for each in scores for value in (each.height_per_s, each.sweep.peak.throughput_infer_per_s)]
    line = [min(ends) / 1.5, max(ends) * 1.5]
    panel.plot(line, line, color="#555555", linestyle=":", label="predicted = measured")
    panel.set(xscale="log", yscale="log", xlim=line, ylim=line)
    panel.set_title("closed form from concurrency 1, at the M of the measured peak", fontsize=10)
    panel.set_xlabel("measured peak, request/s")
    panel.set_ylabel("predicted height, request/s")
    panel.legend(fontsize=8, loc="upper left")


def _at_peak(each: Score, predictor: str) -> float:
    return abs(each.errors[predictor][each.sweep.peak.concurrency])


def _cycle_s(each: Score) -> float:
    assert each.prediction.cycle_s is not None
    return each.prediction.cycle_s


def _service_s(each: Score) -> float:
    assert each.prediction.service_s is not None
    return each.prediction.service_s


def _ratio(each: Score) -> float:
    """D/S."""
    return _cycle_s(each) / _service_s(each) - 1


def _names(scores: Sequence[Score]) -> str:
    return ", ".join(f"`{each.sweep.id}`" for each in scores)


def _batching(sweep: Sweep) -> str:
    return {True: "on", False: "off", None: "not stated"}[sweep.dynamic_batching]


def _word(held: bool | None) -> str:
    return "-" if held is None else "holds" if held else "**breaks**"


def _near(around: Near) -> str:
    """The regret, or the nearest measured M on each side."""
    if around.regret is not None:
        return percent(around.regret)
    sides = (("below", around.low), ("above", around.high))
    texts = [f"nothing {name}" if side is None else f"M = {side[0]}: {percent(side[1])}" for name, side in sides]
    return f"not measured ({'; '.join(texts)})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(["", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _wrapped(text: str) -> str:
    """A paragraph or list item, wrapped at the width of the other pages."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
