"""A picture as SVG within a page, or as a file of its own; the same picture gives the same bytes.

An SVG in a page shares its names and its styles with all else there: ids get the picture's own prefix, the style sheet
goes, and style attributes become plain ones, so that the page's Content-Security-Policy may forbid inline styles.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from b2gmodel.report.report_parts import Picture, plain
from b2gmodel.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS: Final = ("svg", "png", "pdf")
_DPI: Final = 200
# What matplotlib says of each text in one line of CSS, as the attributes that SVG has for it.
_FONT: Final = re.compile(r"^(?:(?P<weight>bold|\d{3}) )?(?P<size>[\d.]+px) ")
_FAMILY: Final = "system-ui, sans-serif"
# A name in a figure is text, never a formula; the salt makes ids depend on what is drawn alone.
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "b2gmodel",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "hatch.color": "white",
    "hatch.linewidth": 0.8,
}


def svg_of(picture: Picture) -> str:
    """The picture as an ``<svg>`` element with its alternative text, for an HTML page."""
    stream = io.BytesIO()
    _drawn(picture, lambda figure: figure.savefig(stream, format="svg", metadata={"Date": None}))
    text = stream.getvalue().decode()
    body = re.sub(r"^.*?<svg[^>]*?viewBox=(\"[^\"]*\")[^>]*>", r"<svg viewBox=\1>", text, count=1, flags=re.DOTALL)
    body = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _own(tag[0], picture.name), body)
    label, told = f"{picture.name}-title", f"{picture.name}-desc"
    head = (
        f'<svg role="img" aria-labelledby="{label}" aria-describedby="{told}" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' stroke-linejoin="round" stroke-linecap="butt" font-family="{_FAMILY}"'
    )
    title, description = _escaped(picture.title), _escaped(picture.description)
    alternative = f'<title id="{label}">{title}</title><desc id="{told}">{description}</desc>'
    return re.sub(r"<svg( [^>]*)>", lambda found: f"{head}{found[1]}>{alternative}", body, count=1).strip()


def save(picture: Picture, path: Path, kind: str) -> None:
    """Write the picture with its title and description to ``path``, in the place of what was there.

    Raises:
        UsageError: a folder that cannot be written.
    """
    told = {"Title": plain(picture.title), "Subject" if kind == "pdf" else "Description": plain(picture.description)}
    metadata: dict[str, str | None] = {**told, **{"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})}

    def write(stream: IO[bytes]) -> None:
        _drawn(picture, lambda figure: figure.savefig(stream, format=kind, dpi=_DPI, metadata=metadata))

    write_atomically(path, write, replace=True)


def _drawn(picture: Picture, use: Callable[[Figure], None]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the page has it in its table.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=picture.size_in, layout="constrained")
        figure.suptitle(textwrap.fill(plain(picture.title), 56, max_lines=3, placeholder=" …"), fontsize=8.5)
        picture.draw(figure)
        use(figure)


def _own(tag: str, name: str) -> str:
    """A tag without inline style, its ids and references the picture's own."""
    plainer = re.sub(r' style="([^"]*)"', lambda found: _attributes(found[1]), tag)
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", plainer)


def _attributes(style: str) -> str:
    """``fill: none; stroke: #000`` as attributes."""
    found = []
    for declaration in filter(None, (part.strip() for part in style.split(";"))):
        name, _, value = declaration.partition(":")
        value = value.strip()
        if name == "font":
            font = _FONT.match(value)
            found += [] if font is None else [("font-size", font["size"])]
            found += [("font-weight", font["weight"])] if font is not None and font["weight"] else []
        else:
            found.append((name, value))
    return "".join(f' {name}="{value}"' for name, value in found)


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(plain(text)))
