"""A report in a real browser: it asks for nothing, sorts, fits, reads in light and dark, prints, and runs no name."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import report_rig as rig

from b2gmodel.ledger import Ledger
from b2gmodel.report.report_cases import gather
from b2gmodel.report.report_page import html_of, page_of

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGES = ("index", "study", "hostile")
FLAT = {1: [310.0, 330.0, 322.0], 2: [580.0, 600.0, 590.0], 3: [500.0, 505.0, 495.0], 4: [490.0, 480.0, 485.0]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None or find_spec("playwright") is None or find_spec("axe_playwright_python") is None:
        pytest.skip("no Chromium, or no playwright: apt-get install chromium; pip install 'b2gmodel[test]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An index over three outcomes, the kept study, and a case whose every text is an attack."""
    folder = tmp_path_factory.mktemp("pages")
    for number, (curve, changes) in enumerate([(rig.CURVE, {}), (FLAT, {}), (rig.CURVE, {"clock": None})]):
        of = rig.calibration().model_copy(update={"name": f"cal{number}"})
        rig.kept(folder, curve, of=of, name=f"measured{number}", **changes)
    rig.hostile(folder / "hostile")
    study = ROOT / "calibration" / "local" / "crossover"
    made = {
        "index": rig.paged(folder),
        "study": page_of(gather(Ledger(study / "predictions"), [], study / "calibration")),
        "hostile": rig.paged(folder / "hostile"),
    }
    files = {name: folder / f"{name}.html" for name in made}
    for name, page in made.items():
        files[name].write_text(html_of(page), encoding="utf-8")
    return files


@contextmanager
def opened(browser: Any, file: Path, *, width: int = 1400, dark: bool = False, script: bool = True) -> Iterator[Any]:
    """The page, with what it said, asked for and failed at in ``page.seen``."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
    )
    page = context.new_page()
    page.seen = []
    page.on("console", lambda message: page.seen.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: page.seen.append(f"error: {error}"))
    page.on("dialog", lambda dialog: page.seen.append("dialog"))
    page.on("request", lambda request: page.seen.append(f"request: {request.url}"))
    page.goto(file.as_uri())
    yield page
    context.close()


def changed(file: Path, change: Callable[[str], str]) -> Path:
    """A page with something planted in it, beside the real one."""
    planted = file.with_name("planted.html")
    planted.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    return planted


def axe(page: Any, *rules: str) -> list[str]:
    """What breaks a rule; of all rules where none is named."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    found = Axe().run(page, options=options).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


@pytest.mark.parametrize("name", PAGES)
def test_it_says_nothing_and_asks_for_nothing(browser: Any, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name]) as page:
        page.locator("th button:visible").first.click()
        assert page.seen == [f"request: {pages[name].as_uri()}"]


def test_an_image_from_elsewhere_is_seen_and_refused(browser: Any, pages: dict[str, Path]) -> None:
    planted = changed(pages["study"], lambda text: text.replace("<main>", '<main><img src="https://e.invalid/x.png">'))
    with opened(browser, planted) as page:
        assert any("Content Security Policy" in each for each in page.seen)


@pytest.mark.parametrize("name", ["index", "study"])
def test_it_is_accessible_in_light_and_dark(browser: Any, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name]) as page:
        if name == "study":
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert axe(page) == []
        page.emulate_media(color_scheme="dark")
        assert axe(page, "color-contrast") == []


def test_poor_contrast_is_seen(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["study"]) as page:
        page.evaluate("document.querySelector('.verdict').style.color = '#bbbbbb'")
        assert [each.split(":")[0] for each in axe(page, "color-contrast")] == ["color-contrast"]


@pytest.mark.parametrize("name", PAGES)
def test_it_fits_a_phone_and_a_screen(browser: Any, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name]) as page:
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        for width in (1400, 360):
            page.set_viewport_size({"width": width, "height": 900})
            assert overflow(page) == []


def overflow(page: Any) -> list[str]:
    """What reaches beyond the page's edge and is not in a container that scrolls."""
    found: list[str] = page.evaluate(
        """() => {
          const edge = document.documentElement.clientWidth;
          const wide = [...document.body.querySelectorAll("*")].filter(each =>
            each.getBoundingClientRect().right > edge + 1 && !each.closest(".scroll table, pre code, svg"));
          const sideways = document.documentElement.scrollWidth > edge ? ["the page scrolls sideways"] : [];
          return [...sideways, ...wide.map(each => each.outerHTML.slice(0, 120))];
        }"""
    )
    return found


def test_what_does_not_fit_is_seen(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["index"], width=360) as page:
        page.evaluate("document.querySelector('.verdict').style.whiteSpace = 'nowrap'")
        assert overflow(page)[0] == "the page scrolls sideways"


@pytest.mark.parametrize("name", PAGES)
def test_text_in_figures_is_whole_and_apart(browser: Any, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name]) as page:
        for width in (1400, 360):
            page.set_viewport_size({"width": width, "height": 900})
            assert crowded(page) == []
            assert min(page.evaluate(FIGURE_TEXT_PX)) > 7.5


FIGURE_TEXT_PX = """() => [...document.querySelectorAll("svg text")].map(each =>
  parseFloat(getComputedStyle(each).fontSize) * each.ownerSVGElement.getScreenCTM().a)"""


def crowded(page: Any) -> list[str]:
    """Text in figures that lies on other text, or beyond its figure."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("svg")].flatMap(figure => {
          const edge = figure.getBoundingClientRect();
          const texts = [...figure.querySelectorAll("text")];
          const all = texts.map(each => [each.textContent, each.getBoundingClientRect()]);
          const out = all.filter(([, box]) => box.left < edge.left - 1 || box.right > edge.right + 1
            || box.top < edge.top - 1 || box.bottom > edge.bottom + 1);
          const shared = (a, b) => [Math.min(a.right, b.right) - Math.max(a.left, b.left),
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
          // A line's box is taller than its letters: boxes of lines below each other share a little.
          const on = all.flatMap(([text, box], at) => all.slice(at + 1).filter(([, other]) => {
            const [wide, high] = shared(box, other);
            return wide > 1 && high > 0.3 * Math.min(box.height, other.height);
          }).map(([other]) => `${text} on ${other}`));
          return [...out.map(([text]) => `${text} is cut off`), ...on];
        })"""
    )
    return found


def test_crowded_text_is_seen(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["study"]) as page:
        page.evaluate("document.querySelector('svg text').textContent = 'x'.repeat(200)")
        assert any(each.endswith("is cut off") for each in crowded(page))
        page.evaluate("document.querySelectorAll('svg text')[1].replaceWith(document.querySelector('svg text'))")
        page.evaluate("document.querySelector('svg').append(document.querySelector('svg text').cloneNode(true))")
        assert any(" on " in each for each in crowded(page))


def column(table: Any, number: int) -> list[str]:
    return [text.strip() for text in table.locator(f"tbody tr td:nth-child({number})").all_inner_texts()]


def test_tables_sort_both_ways_by_size(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["study"]) as page:
        table = page.locator("table", has=page.get_by_text("Each cell: measured")).first
        heads = table.locator("thead th")
        payloads, button = heads.nth(1), heads.nth(1).get_by_role("button")
        assert button.inner_text() == "payload, KiB"
        button.click()
        assert payloads.get_attribute("aria-sort") == "ascending"
        assert column(table, 2) == ["588", "1200", "2028", "2800", "3600", "4800"]
        button.focus()
        page.keyboard.press("Enter")
        assert payloads.get_attribute("aria-sort") == "descending"
        assert column(table, 2) == ["4800", "3600", "2800", "2028", "1200", "588"]
        heads.nth(0).get_by_role("button").click()
        assert payloads.get_attribute("aria-sort") is None
        assert column(table, 1)[:2] == ["ladder-588", "ladder-1200"]  # digits within a name count as a number


def test_what_is_missing_stays_last(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["index"]) as page:
        table = page.locator("table", has=page.get_by_text("Each predictor over all verdicts")).first
        names = table.locator("thead th").all_inner_texts()
        number = next(at for at, name in enumerate(names, start=1) if name.startswith("regret"))
        for _ in range(2):
            table.locator("thead th").nth(number - 1).get_by_role("button").click()
            assert column(table, number)[-1] == "–"
            assert column(table, number)[0] != "–"


def test_without_script_all_is_there(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["index"], script=False) as page:
        assert page.locator("button").count() == 0
        assert page.locator("th").first.inner_text() == "outcome"
        assert page.locator(".verdict").first.inner_text() == "Of 3 cases: 1 held, 1 refuted, 1 invalid."


def test_the_verdict_is_seen_first_and_only_what_held_is_green(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["index"]) as page:
        colours = dict(
            page.locator(".case > .outcome").evaluate_all(
                "all => all.map(each => [each.querySelector('b').textContent, getComputedStyle(each).color])"
            )
        )
        assert set(colours) == {"held", "refuted", "invalid"}
        assert len(set(colours.values())) == 3
    with opened(browser, pages["study"], width=360) as page:
        box = page.locator(".verdict").first.bounding_box()
        assert box["y"] < 200


def test_headings_and_landmarks_are_in_order(browser: Any, pages: dict[str, Path]) -> None:
    for name in PAGES:
        with opened(browser, pages[name]) as page:
            levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(each => Number(each.tagName[1]))")
            assert levels[0] == 1
            assert levels.count(1) == 1
            assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
            assert page.locator("main").count() == 1
            assert page.locator("html").get_attribute("lang") == "en"
            told = page.locator("svg > desc").all_text_contents()
            assert len(told) == page.locator("svg").count() > 0
            assert all(told)


def test_print_keeps_what_is_folded(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["study"], dark=True) as page:
        folded = page.locator("details table").first
        assert not folded.is_visible()
        page.emulate_media(media="print")
        assert folded.evaluate("each => each.getBoundingClientRect().height") > 0
        assert page.locator("body").evaluate("each => getComputedStyle(each).backgroundColor") == "rgb(255, 255, 255)"
        clipped = page.locator(".scroll").evaluate_all("all => all.map(each => getComputedStyle(each).overflowX)")
        assert set(clipped) == {"visible"}
        assert page.pdf().startswith(b"%PDF-")


def test_hostile_names_are_inert(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["hostile"]) as page:
        for each in page.locator("h1:visible, .verdict:visible, td:visible").all()[:20]:
            each.click()
        assert page.evaluate("window.bad") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        text = page.locator("body").inner_text()
        for attack in ("<script>window.bad=1</script>", 'onerror="window.bad=2"', "{{7*7}}", "]]>", "\\u{202e}RTL"):
            assert attack in text
        assert page.seen == [f"request: {pages['hostile'].as_uri()}"]


def test_a_name_that_ran_would_be_seen(browser: Any, pages: dict[str, Path]) -> None:
    def loosened(text: str) -> str:
        open_to_all = text.replace("http-equiv=", "data-was=", 1)
        return open_to_all.replace("<main>", "<main><script>window.bad=1</script>")

    with opened(browser, changed(pages["hostile"], loosened)) as page:
        assert page.evaluate("window.bad") == 1
    strict = changed(pages["hostile"], lambda text: text.replace("<main>", "<main><script>window.bad=1</script>"))
    with opened(browser, strict) as page:
        assert page.evaluate("window.bad") is None  # the policy alone would hold it, too
