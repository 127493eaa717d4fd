"""A report: what the records say, as one HTML file that asks nothing of a network, or as Markdown.

Rules here: names come from strangers, so each template escapes all that it is given; the same records give the same
bytes, so no clock, no path and no host of the reader's own is in the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from b2gmodel import __version__
from b2gmodel.ledger import AnyPrediction
from b2gmodel.placement_records import StudyPrediction
from b2gmodel.records import Verdict
from b2gmodel.report.report_cases import Case, Gathered
from b2gmodel.report.report_parts import CaseView, Cell, Picture, Section, Sentence, Table
from b2gmodel.report.report_scores import SCORED, scores_table
from b2gmodel.report.report_sections import EMULATED, model_view
from b2gmodel.report.report_study import study_view
from b2gmodel.report.report_svg import svg_of
from b2gmodel.scores import track_record

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES: Final = files("b2gmodel.report") / "templates"


@dataclass(frozen=True, slots=True)
class Page:
    """A report before it has a form.

    Attributes:
        headline: the answer over all cases.
        index: what stands before the cases; () where one case is all there is.
    """

    title: str
    headline: str
    notes: tuple[str, ...]
    index: tuple[Section, ...]
    cases: tuple[CaseView, ...]
    made_by: str

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(picture for case in self.cases for picture in case.pictures)


def page_of(gathered: Gathered) -> Page:
    """The cases as they are shown; an index first where there are several."""
    cases = [_view(case, case.prediction.record) for case in gathered.cases]
    counts = {name: sum(case.outcome == name for case in cases) for name in dict.fromkeys(c.outcome for c in cases)}
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    drawer = f"The ledger holds {gathered.frozen} frozen predictions: {gathered.without_outcome} without an outcome, "
    several = len(cases) > 1
    return Page(
        title=f"b2g report: {len(cases)} cases" if several else f"b2g report: {cases[0].title}",
        headline=f"Of {len(cases)} cases: {told}." if several else f"{cases[0].outcome}: {cases[0].sentence}",
        notes=(f"{drawer}{gathered.abandoned} abandoned.",),
        index=_index(gathered, cases) if several else (),
        cases=tuple(cases),
        made_by=f"Made by b2g report {__version__} from records alone; the same records give this file byte for byte.",
    )


def _view(case: Case, prediction: AnyPrediction) -> CaseView:
    return study_view(case, prediction) if isinstance(prediction, StudyPrediction) else model_view(case, prediction)


def _index(gathered: Gathered, cases: list[CaseView]) -> tuple[Section, ...]:
    rows = tuple(
        (Cell(case.outcome, tone=case.tone), Cell(case.title, place=case.place), Cell(case.setting),
         Cell(", ".join(case.tags)), Cell(case.sentence))
        for case in cases
    )  # fmt: skip
    columns = ("outcome", "case", "set", "to know", "verdict")
    verdicts = Section(
        "Verdicts", (Table("All cases, in the ledger's order", columns, rows, frozenset({"case", "verdict"})),)
    )
    judged = [case.verdict.record for case in gathered.cases if case.verdict is not None]
    scores = track_record([verdict for verdict in judged if isinstance(verdict, Verdict)])
    if not scores:
        return (verdicts,)
    tag = f"some {EMULATED}" if any(EMULATED in case.tags for case in cases) else ""
    table = scores_table(scores, "Each predictor over all verdicts, each M of each verdict weighing alike")
    return (verdicts, Section("Track record of the predictors", (table, Sentence(SCORED)), tag))


def html_of(page: Page) -> str:
    """The page as one HTML file. Scripts and styles are allowed by their digests alone, and nothing else at all."""
    from markupsafe import Markup

    style, script = (_TEMPLATES.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "sort.js"))
    return _environment(autoescape=True, filters={}).get_template("page.html.j2").render(
        page=page,
        svg=lambda picture: Markup(svg_of(picture)),  # noqa: S704  ours, its text escaped in report_svg.py
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        style_hash=Markup(_source_hash(style)),  # noqa: S704
        script_hash=Markup(_source_hash(script)),  # noqa: S704
    )  # fmt: skip


def markdown_of(page: Page, file_of: Callable[[Picture], str | None]) -> str:
    """The page as Markdown.

    Args:
        file_of: a picture's file as a link to it, None where it has none; its words and numbers are there anyway.
    """
    environment = _environment(autoescape=False, filters={"raw": _Raw, "fenced": _fenced}, finalize=_markdown)
    text = environment.get_template("page.md.j2").render(page=page, file_of=file_of)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip() + "\n"


def _environment(filters: Mapping[str, Callable[..., Any]], **options: Any) -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def source(name: str) -> str:
        return _TEMPLATES.joinpath(name).read_text(encoding="utf-8")

    made = Environment(loader=FunctionLoader(source), undefined=StrictUndefined, **options)  # noqa: S701
    made.filters.update(filters)
    return made


def _source_hash(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class _Raw(str):
    """Markdown that is ours, or escaped already."""

    __slots__ = ()


_MARKS: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "{": "&#123;", "}": "&#125;"}


def _markdown(value: object) -> str:
    """Text that no reader of Markdown takes for a mark, a tag or a link. All of it is on one line."""
    if isinstance(value, _Raw):
        return value
    text = re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", str(value))
    text = re.sub(r"[&<>{}]", lambda mark: _MARKS[mark[0]], text)
    text = re.sub(r"(?<=:)//|(?<=www)\.", r"\\\g<0>", text, flags=re.IGNORECASE)
    text = text.replace("@", "<span>@</span>")  # an address or a person's name leads there, whatever stands before it
    return re.sub(r"^(\d*)([-+.)](?=[\s-]|$)|[=#])", r"\1\\\2", text)


def _fenced(text: str) -> _Raw:
    """A block of code with a fence that is longer than any within it."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return _Raw(f"{fence}text\n{text}\n{fence}")
