"""The documentation as a site: it builds without a warning, every link in it resolves, and nothing is fetched."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])


def built(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = built(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


class Parsed(HTMLParser):
    """A page's links, anchors, and what a browser fetches to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in {"a", "area"}:
            self.links += [values["href"]] if "href" in values else []
        elif tag != "link" or values.get("rel") in {"stylesheet", "icon", "preload", "preconnect"}:
            self.fetched += [values[name] for name in ("href", "src") if name in values]

    def handle_data(self, data: str) -> None:
        self.text += data


def broken(site: Path) -> Iterator[str]:
    """Each link and source within a site that leads nowhere, and each one that is fetched from elsewhere."""
    pages = {path: Parsed(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":  # Its links begin at the site's root, wherever that is.
            continue
        for target in [*page.links, *page.fetched]:
            parts = urlsplit(target)
            if parts.scheme == "mailto" or (parts.scheme and target not in page.fetched):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchors = pages[file].anchors if file in pages else set()
            if parts.scheme or parts.netloc or not file.is_file():
                yield f"{path.relative_to(site)}: {target}"
            elif parts.fragment and file in pages and unquote(parts.fragment) not in anchors:
                yield f"{path.relative_to(site)}: {target}: no such anchor"


def test_every_link_of_the_site_resolves_and_nothing_is_fetched(site: Path) -> None:
    assert list(broken(site)) == []
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert [each for text in styles for each in re.findall(r"url\(\W?(?:https?:)?//[^)]*", text)] == []


def test_every_page_is_on_the_site(site: Path) -> None:
    elsewhere = runpy.run_path(str(ROOT / "tools" / "docs_hooks.py"))["ELSEWHERE"]
    page_of = {ROOT / file: page for page, file in elsewhere.items()}
    for path in MARKDOWN:
        page = page_of.get(path) or str(path.relative_to(ROOT / "docs")).replace("README", "index")
        assert (site / page).with_suffix(".html").is_file(), path


def test_no_markup_is_left_over(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = Parsed(re.sub(r"<(code|script|style)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S)).text
        assert not re.search(r"```|\]\(|^\|.*\|$|<!--", text, re.M), path


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('<a href="glossary.html"', '<a href="glosary.html"'),
        ('id="how-records-come-to-be"', 'id="x"'),
        ('<img src="a.svg"', '<img src="https://example.com/a.svg"'),
        ('<img src="a.svg"', '<img src="b.svg"'),
    ],
)
def test_a_broken_link_is_seen(right: str, wrong: str, tmp_path: Path) -> None:
    page = (
        '<a href="glossary.html">g</a> <a href="#how-records-come-to-be">h</a> <img src="a.svg">'
        '<h2 id="how-records-come-to-be">h</h2> <a href="https://example.com/">e</a>'
    )
    (tmp_path / "a.svg").touch()
    (tmp_path / "glossary.html").touch()
    (tmp_path / "index.html").write_text(page)
    assert list(broken(tmp_path)) == []
    assert right in page
    (tmp_path / "index.html").write_text(page.replace(right, wrong))
    assert len(list(broken(tmp_path))) == 1


@pytest.mark.parametrize("wrong", ["[a](nowhere.md)", "[a](glossary.md#nowhere)", "[a](/glossary.md)"])
def test_the_build_refuses_a_dead_link(wrong: str, tmp_path: Path) -> None:
    for name in ("docs", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml"]:
        shutil.copy(path, tmp_path)
    page = tmp_path / "docs" / "glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n{wrong}\n", encoding="utf-8")
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert re.search(rf"WARNING .*'glossary.md'.*{re.escape(wrong[4:-1])}", done.stderr), done.stderr


def dead_in_repository(file: Path) -> Iterator[str]:
    """Relative links and images of a Markdown file that lead to no file: what a Git host would show."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^()\s]+)\)", text):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", target) and not (file.parent / path).exists():
            yield f"{file.name}: {target}"


@pytest.mark.parametrize("file", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_resolves_in_the_repository(file: Path) -> None:
    assert list(dead_in_repository(file)) == []


def test_a_dead_link_in_the_repository_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.md"
    file.write_text("[a](x.md#b) `[b](c.md)` ![d](d.svg) [e](https://example.com/e.md)")
    assert list(dead_in_repository(file)) == ["x.md: d.svg"]


def test_the_decisions_are_all_listed() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    for file in (ROOT / "docs" / "adr").glob("0*.md"):
        number, title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split(". ", 1)
        assert f"- [{number}: {title}]({file.name})" in index


def test_the_reference_is_what_the_code_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "tools" / "reference.py"))["main"]
    assert main(["--check"]) == 0, capsys.readouterr().out
    assert main(["--check"], tmp_path) == 1
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    (tmp_path / "cli.md").write_text("old")
    assert main(["--check"], tmp_path) == 1
    assert "cli.md; python tools/reference.py" in capsys.readouterr().out
