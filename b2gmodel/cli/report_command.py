"""The command that shows what was predicted, measured and judged: b2g report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import Json, PredictionsFolder, one_of
from b2gmodel.cli.output import say, say_json
from b2gmodel.errors import UsageError

if TYPE_CHECKING:
    from b2gmodel.report.report_page import Page
    from b2gmodel.report.report_parts import Picture


def register(app: typer.Typer) -> None:
    add_command(
        app,
        report,
        example="b2g report predictions/NAME-DIGEST.json --out report.html",
        exits={3: "a record was changed or is damaged"},
    )


def report(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PREDICTION]...",
            help="Frozen predictions: files, or 8 digits of their digests. Default: all with a verdict.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="A .html or .md file; an older one is replaced.")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for each figure as a file, too.", show_default=False)
    ] = None,
    figure_format: Annotated[
        str, typer.Option("--figure-format", help="svg, png or pdf.", autocompletion=one_of("svg", "png", "pdf"))
    ] = "svg",
    calibrations: Annotated[
        Path, typer.Option("--calibrations", help="Folder that is searched for calibrations and measurements.")
    ] = Path("calibration"),
    predictions: PredictionsFolder = Path("predictions"),
    json: Json = False,
) -> None:
    """Write a report: verdicts, what to set, figures, scores, provenance."""
    from b2gmodel.ledger import Ledger
    from b2gmodel.report.report_cases import gather
    from b2gmodel.report.report_page import html_of, markdown_of, page_of
    from b2gmodel.report.report_svg import FORMATS, save

    if out.suffix not in (".html", ".md"):
        raise UsageError("not a kind of report", observed=out.suffix, allowed=".html, .md", where="--out")
    if figure_format not in FORMATS:
        raise UsageError(
            "not a kind of figure", observed=figure_format, allowed=", ".join(FORMATS), where="--figure-format"
        )
    page = page_of(gather(Ledger(predictions), wanted or [], calibrations))
    written = {} if figures is None else {each.name: figures / f"{each.name}.{figure_format}" for each in page.pictures}
    for picture in page.pictures if written else ():
        save(picture, written[picture.name], figure_format)

    def file_of(picture: Picture) -> str | None:
        path = written.get(picture.name)
        return None if path is None else Path(os.path.relpath(path, out.parent)).as_posix()

    _write(out, html_of(page) if out.suffix == ".html" else markdown_of(page, file_of))
    if json:
        say_json(_answer(page, out, list(written.values())))
        return
    say(page.headline)
    for case in page.cases if page.index else ():
        say(f"  {case.outcome:<12}  {case.title}; set {case.setting}")
    for sentence in dict.fromkeys(sentence for case in page.cases for sentence in case.missing):
        say(f"  {sentence}")
    if written:
        say(f"figures: {len(written)} in {figures}")
    say(f"written: {out}")
    say(f"next: open {out} in a browser" if out.suffix == ".html" else f"next: read {out}")


def _write(path: Path, text: str) -> None:
    """The report whole, in the place of an older one."""
    from b2gmodel.store import write_atomically

    write_atomically(path, lambda stream: stream.write(text.encode()), replace=True)


def _answer(page: Page, out: Path, figures: list[Path]) -> dict[str, object]:
    """Names alone: the same records in another folder give the same answer."""
    return {
        "cases": [
            {
                "case": case.place,
                "missing": list(case.missing),
                "outcome": case.outcome,
                "sentence": case.sentence,
                "set": case.setting,
                "tags": list(case.tags),
                "title": case.title,
            }
            for case in page.cases
        ],
        "figures": [path.name for path in figures],
        "file": out.name,
        "headline": page.headline,
    }
