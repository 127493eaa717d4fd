"""A report says what the records say, no more; hostile names stay text; the same records give the same bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import builders
import pytest
import report_rig as rig
import typer
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from b2gmodel.cli import report_command
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.ledger import Ledger
from b2gmodel.report.report_cases import gather
from b2gmodel.report.report_page import html_of, markdown_of, page_of
from b2gmodel.report.report_parts import CaseView, Code, Picture, Sentence, Table, plain
from b2gmodel.report.report_svg import save, svg_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One case that held, with everything there."""
    folder = tmp_path_factory.mktemp("ordinary")
    rig.kept(folder)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    rig.hostile(folder)
    return folder


@pytest.fixture
def copied(ordinary: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ordinary, tmp_path / "copied"))


def only(folder: Path, *wanted: str) -> CaseView:
    (case,) = rig.paged(folder, *wanted).cases
    return case


def parts(case: CaseView, title: str) -> tuple[object, ...]:
    return next(section.parts for section in case.sections if section.title == title)


def words_of(case: CaseView) -> str:
    return "\n".join(
        part.text for section in case.sections for part in section.parts if isinstance(part, (Sentence, Code))
    )


def of_kind(folder: Path, pattern: str) -> Path:
    (path,) = (folder / "predictions").glob(pattern)
    return path


# What is said.


def test_what_held_says_so_and_how_to_set_it(ordinary: Path) -> None:
    case = only(ordinary)
    assert (case.outcome, case.tone, case.setting) == ("held", "held", "M = 3")
    assert case.tags == ("emulated compute",)
    assert case.sentence.startswith("The predicted M* = 3 held")
    assert "b2g serve --url http://HOST:8000 --model m -k 8 -M 3" in words_of(case)
    assert [section.title for section in case.sections] == [
        "What to set", "Throughput against batches in flight", "Where the time goes", "What binds", "Claims", "Heights",
        "Predictors", "Evidence", "Diagnostics and notes", "Provenance",
    ]  # fmt: skip


def test_emulated_compute_is_said_where_it_matters(ordinary: Path, tmp_path: Path) -> None:
    case = only(ordinary)
    untouched = {section.title for section in case.sections if section.tag != "emulated compute"}
    assert untouched == {"Evidence", "Provenance"}
    assert all("(emulated compute)" in text for text in (case.title, *(picture.title for picture in case.pictures)))
    rig.kept(tmp_path, of=rig.calibration(compute="real"))
    assert "emulated" not in html_of(rig.paged(tmp_path))


FLAT = {1: [310.0, 330.0, 322.0], 2: [580.0, 600.0, 590.0], 3: [500.0, 505.0, 495.0], 4: [490.0, 480.0, 485.0]}
WIDE = {1: [320.0, 330.0], 2: [560.0, 600.0], 3: [600.0, 790.0], 4: [800.0, 610.0]}


def test_a_refuted_place_recommends_what_was_measured(tmp_path: Path) -> None:
    rig.kept(tmp_path, FLAT)
    case = only(tmp_path)
    assert (case.outcome, case.tone, case.setting) == ("refuted", "refuted", "M = 2")
    assert "-M 2 " in words_of(case)
    assert "confidence high" not in html_of(rig.paged(tmp_path))


def test_what_is_not_decided_is_not_coloured_favourably(tmp_path: Path) -> None:
    rig.kept(tmp_path, WIDE)
    case = only(tmp_path)
    assert (case.outcome, case.tone) == ("inconclusive", "undecided")
    assert case.setting == "M = 3, predicted and not decided"
    assert "confidence low" in html_of(rig.paged(tmp_path))


def test_invalid_evidence_recommends_nothing(tmp_path: Path) -> None:
    rig.kept(tmp_path, clock=None)
    case = only(tmp_path)
    assert (case.outcome, case.tone, case.setting) == ("invalid", "undecided", "nothing yet")
    assert "b2g serve" not in words_of(case)


def test_not_preregistered_is_said_first() -> None:
    """The published figures, as they are kept: neither S nor D is stated, and no batch size."""
    case = only_kept("86b8bf8f")
    assert case.tags == ("not pre-registered",)
    assert "The figures were measured before the prediction was made." in words_of(case)
    assert "There is no command to paste: the batch size is not stated." in words_of(case)
    assert "The source states neither S nor D" in words_of(case)
    assert [picture.name[-10:] for picture in case.pictures] == ["throughput"]


def only_kept(digest: str) -> CaseView:
    (case,) = page_of(gather(Ledger(ROOT / "predictions"), [digest], ROOT / "calibration")).cases
    return case


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ("calibration/cal.json", "The calibration cal with digest .* is not here"),
        ("predictions/measured.json", "The measurement with digest .* is not here"),
        ("predictions/*verdict*", "The verdict's file is not here"),
    ],
)
def test_what_is_missing_is_said(copied: Path, remove: str, said: str) -> None:
    (path,) = copied.glob(remove)
    path.unlink()
    page = rig.paged(copied)
    assert re.search(said, words_of(page.cases[0]))
    assert html_of(page)
    assert markdown_of(page, lambda _: None)


def test_another_calibration_by_that_name_is_said(copied: Path) -> None:
    path = copied / "calibration" / "cal.json"
    path.write_bytes(path.read_bytes() + b" ")
    (case,) = rig.paged(copied).cases
    assert re.search("cal with digest .* is not here, and what is here by that name is another", case.missing[0])


def test_nothing_measured_and_nothing_judged(tmp_path: Path) -> None:
    digest = rig.kept(tmp_path, None)
    with pytest.raises(UsageError, match="nothing to report: no prediction here has a verdict"):
        rig.paged(tmp_path)
    case = only(tmp_path, digest[:8])
    assert (case.outcome, case.tone, case.setting) == ("not judged", "undecided", "M = 3, predicted alone")
    assert "This prediction has not been measured." in words_of(case)
    rig.kept(tmp_path / "2", judged=False)
    assert "This measurement has not been judged" in words_of(only(tmp_path / "2", digest[:8]))


@pytest.mark.parametrize("pattern", ["p*-*.json", "measured.json", "*verdict*", "ledger.jsonl"])
def test_what_was_changed_is_refused(copied: Path, pattern: str) -> None:
    pattern = of_prediction(copied) if pattern.startswith("p*") else pattern
    path = of_kind(copied, pattern)
    content = path.read_bytes()
    path.write_bytes(content[:-9] if pattern == "ledger.jsonl" else re.sub(rb"[1-8](?=[,}])", b"9", content, count=1))
    with pytest.raises(EvidenceError):
        rig.paged(copied)


def of_prediction(folder: Path) -> str:
    line = json.loads((folder / "predictions" / "ledger.jsonl").read_text().splitlines()[0])
    return str(line["file"])


def test_what_is_not_stated_is_a_dash_and_never_a_zero(ordinary: Path) -> None:
    (scores, _) = parts(only(ordinary), "Predictors")
    assert isinstance(scores, Table)
    by_name = {row[0].text: row for row in scores.rows}
    assert by_name["best constant"][scores.columns.index("regret of its M*")].text == "–"
    assert "energy score" in scores.columns


def test_legs_are_a_bar_and_their_times_add_up(ordinary: Path, tmp_path: Path) -> None:
    picture = parts(only(ordinary), "Where the time goes")[0]
    assert isinstance(picture, Picture)
    assert [row[0].text for row in picture.data.rows] == [
        "pack", "send", "server receive", "queue", "compute input", "compute infer", "compute output", "return",
        "deliver", "residual",
    ]  # fmt: skip
    assert sum(row[3].value or 0.0 for row in picture.data.rows) == pytest.approx(1.0)
    assert "compute infer 8 ms" in picture.description
    rig.kept(tmp_path, of=builders.calibration())
    picture = parts(only(tmp_path), "Where the time goes")[0]
    assert isinstance(picture, Picture)
    assert [row[0].text for row in picture.data.rows] == ["transport overhead D", "service time S"]


def test_the_figure_says_its_numbers(ordinary: Path) -> None:
    picture = parts(only(ordinary), "Throughput against batches in flight")[0]
    assert isinstance(picture, Picture)
    assert "M = 3: 795.0 [786.6, 803.4]" in picture.description
    assert "closed-form puts M* at 3" in picture.description
    assert picture.data.columns[:2] == ("M", "measured")


def test_a_study_has_its_crossover_and_its_maps() -> None:
    folder = ROOT / "calibration" / "local" / "crossover"
    page = page_of(gather(Ledger(folder / "predictions"), [], folder / "calibration"))
    (case,) = page.cases
    assert (case.outcome, case.tone, case.tags) == ("inconclusive", "undecided", ("emulated compute",))
    assert case.setting.startswith("batch in the proxy below 3237 KiB [2915, 3724] (measured, not decided)")
    assert [picture.name.split("-", 3)[3] for picture in case.pictures] == [
        "ratio", "gain", "map-compute", "map-link", "legs",
    ]  # fmt: skip
    assert "Crossover measured 3237 KiB [2915, 3724], predicted 2847 KiB" in case.pictures[0].description
    bare = page_of(gather(Ledger(folder / "predictions"), [], folder / "sessions"))
    assert "There is no map: the calibrations of ladder-1200" in words_of(bare.cases[0])
    assert "The calibrations are not here" in words_of(bare.cases[0])


def test_several_cases_have_an_index_first(tmp_path: Path) -> None:
    rig.kept(tmp_path)
    rig.kept(tmp_path, FLAT, of=rig.calibration(name="other").model_copy(update={"name": "cal2"}), name="second")
    page = rig.paged(tmp_path)
    assert page.headline == "Of 2 cases: 1 held, 1 refuted."
    assert [section.title for section in page.index] == ["Verdicts", "Track record of the predictors"]
    places = [row[1].place for table in page.index[0].parts if isinstance(table, Table) for row in table.rows]
    assert places == [case.place for case in page.cases]


# Its form.


class Tags(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def dangers(text: str) -> Iterator[str]:
    """What could run, load or lead away."""
    for tag, attributes in Tags(text).found:
        if tag in {"script", "img", "iframe", "object", "embed", "link", "base", "form", "b"}:
            yield tag
        for name, value in attributes.items():
            leads = name in {"href", "src", "xlink:href", "action"} and not (value or "").startswith("#")
            if name.startswith("on") or leads or (name == "style"):
                yield f"{tag} {name}={value}"


def test_the_page_names_nothing_outside_itself(ordinary: Path, hostile: Path) -> None:
    for folder in (ordinary, hostile):
        text = html_of(rig.paged(folder))
        assert [danger for danger in dangers(text) if danger not in {"b"}] == ["script"]
        assert not re.search(r"url\((?!#)", re.sub(r"<code>.*?</code>", "", text, flags=re.DOTALL))
    assert list(dangers('<p onclick="x"><a href="https://e.invalid">x</a>')) == [
        "p onclick=x",
        "a href=https://e.invalid",
    ]


def test_only_its_own_script_and_style_may_run(ordinary: Path) -> None:
    text = html_of(rig.paged(ordinary))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    for kind in ("style", "script"):
        (own,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy


def test_ids_are_unique_and_references_lead_somewhere(tmp_path: Path) -> None:
    rig.kept(tmp_path)
    rig.kept(tmp_path, FLAT, of=rig.calibration().model_copy(update={"name": "cal2"}), name="second")
    found = Tags(html_of(rig.paged(tmp_path))).found
    ids = [each["id"] for _, each in found if "id" in each]
    assert len(ids) == len(set(ids))
    named = {each.get(name) for _, each in found for name in ("aria-labelledby", "aria-describedby")}
    led_to = {(each.get(name) or "#")[1:] for _, each in found for name in ("href", "xlink:href")}
    assert (named | led_to) - {None, ""} <= set(ids)


def test_the_same_records_give_the_same_bytes(ordinary: Path, copied: Path) -> None:
    assert html_of(rig.paged(ordinary)) == html_of(rig.paged(copied))
    assert markdown_of(rig.paged(ordinary), lambda _: None) == markdown_of(rig.paged(copied), lambda _: None)
    assert str(ordinary) not in html_of(rig.paged(ordinary))


def test_hostile_names_are_text_in_html(hostile: Path) -> None:
    page = rig.paged(hostile)
    text = html_of(page)
    assert "&lt;script&gt;window.bad=1&lt;/script&gt;" in text
    assert "{{7*7}}" in text
    assert not re.search("[\u0000\u0007\u202e\u2066]", text)
    assert "There is no command to paste: a name in it would mean something to a shell." in text


def test_hostile_names_are_text_in_markdown(hostile: Path) -> None:
    text = markdown_of(rig.paged(hostile), lambda _: None)
    shown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    assert list(dangers(shown)) == []
    assert "<h1># h" not in shown
    assert "{{" not in text
    assert not re.search("[\u0000\u0007\u202e\u2066]", text)
    planted = MarkdownIt("commonmark", {"html": True}).render(rig.ATTACK)
    assert "script" in list(dangers(planted))


def test_markdown_holds_what_the_page_holds(ordinary: Path) -> None:
    page = rig.paged(ordinary)
    text = markdown_of(page, lambda picture: f"figures/{picture.name}.png")
    (case,) = page.cases
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert [heading for _, heading in re.findall(r"<h([12])>(.*?) ?(?:\(emul.*?)?</h\1>", shown)][1:] == [
        section.title for section in case.sections
    ]
    assert shown.count("<table>") == sum(
        isinstance(part, (Table, Picture)) for section in case.sections for part in section.parts
    )
    assert f"](<figures/{case.place}-legs.png>)" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb\u0000c", "a\\u{202e}b\\u{0}c"),
        ("one\ntwo\tthree", "one two three"),
        ("שלום, 日本, é", "שלום, 日本, é"),
    ],
)
def test_unseen_characters_are_shown_by_their_number(text: str, shown: str) -> None:
    assert plain(text) == shown


# Figures as files, and the command.


def test_figures_are_the_same_bytes_each_time(ordinary: Path, tmp_path: Path) -> None:
    for picture in only(ordinary).pictures:
        assert svg_of(picture) == svg_of(picture)
        for kind, magic in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF-")):
            files = [tmp_path / f"{number}.{kind}" for number in (1, 2)]
            for file in (*files, *files):
                save(picture, file, kind)
            assert files[0].read_bytes() == files[1].read_bytes()
            assert files[0].read_bytes().startswith(magic)


def test_a_figure_file_carries_its_words(hostile: Path, tmp_path: Path) -> None:
    for picture in only(hostile).pictures:
        save(picture, tmp_path / "figure.svg", "svg")
        root = ElementTree.parse(tmp_path / "figure.svg").getroot()
        assert root.findtext("{*}title") == picture.title
        assert root.findtext(".//{*}description") == picture.description
        for kind in ("png", "pdf"):
            save(picture, tmp_path / f"figure.{kind}", kind)


def b2g(*arguments: object) -> tuple[int, str]:
    app = typer.Typer()
    report_command.register(app)
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def folders(of: Path) -> tuple[object, ...]:
    return ("--predictions", of / "predictions", "--calibrations", of / "calibration")


def test_the_command_writes_a_page_and_says_the_verdict(ordinary: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    code, said = b2g(*folders(ordinary), "--out", out)
    assert code == 0
    first, *_, written, following = said.splitlines()
    assert first.startswith("held: The predicted M* = 3 held")
    assert (written, following) == (f"written: {out}", f"next: open {out} in a browser")
    before = out.read_bytes()
    (empty := tmp_path / "none").mkdir()
    b2g(*folders(ordinary), "--out", out)
    assert out.read_bytes() == before
    _, said = b2g("--predictions", ordinary / "predictions", "--calibrations", empty, "--out", out)
    assert re.search("^  The calibration cal with digest .* is not here", said, re.MULTILINE)


def test_the_command_writes_markdown_with_figures(ordinary: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "report.md", tmp_path / "figures"
    _, said = b2g(*folders(ordinary), "--out", out, "--figures", figures, "--figure-format", "png", "--json")
    answer = json.loads(said)
    assert sorted(answer["figures"]) == sorted(path.name for path in figures.iterdir())
    assert (answer["file"], answer["cases"][0]["outcome"], answer["cases"][0]["set"]) == ("report.md", "held", "M = 3")
    for name in answer["figures"]:
        assert f"](<figures/{name}>)" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--out", "report.pdf"], "not a kind of report"),
        (["--figure-format", "gif"], "not a kind of figure"),
        (["nothing"], "no such prediction"),
        (["--out", "/proc/report.html"], "cannot write the"),
    ],
)
def test_wrong_use_is_one_line(ordinary: Path, tmp_path: Path, arguments: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        b2g("--out", tmp_path / "report.html", *folders(ordinary), *arguments)
