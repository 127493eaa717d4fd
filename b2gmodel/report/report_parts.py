"""What a report is made of, before it has a form: tables, pictures, sentences. HTML and Markdown show the same parts.

Rules here: text is as the records hold it, made harmless for a reader's eye alone (no control characters, no invisible
turns of direction); what makes it harmless for a browser is the template's.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from b2gmodel.records import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["held", "refuted", "undecided", "plain"]
TONES: Final[dict[str, Tone]] = {"held": "held", "refuted": "refuted", "passed": "held", "failed": "refuted"}
"""Every other outcome is undecided: what is invalid, inconclusive, not checked or not judged is never shown as good."""

EMPTY: Final = "–"
_KIB: Final = 1024
# Characters that a reader does not see, or that turn the text around them: shown by their number.
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def plain(text: str) -> str:
    """``text`` on one line, with a visible number for each character that is none."""
    shown = (f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in _UNSEEN and c not in "\n\t" else c for c in text)
    return " ".join("".join(shown).split())


def plain_lines(text: str) -> str:
    """``plain`` for each line."""
    return "\n".join(plain(line) for line in text.splitlines())


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell: its text, what it is sorted by (None: by the text, and after all numbers), its tone.

    ``place`` is the place in the page that it leads to; '' for none.
    """

    text: str
    value: float | None = None
    tone: Tone = "plain"
    place: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; ``wide`` names the columns of sentences, which may break lines, ``folded`` one that opens when asked."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    wide: frozenset[str] = frozenset()
    folded: bool = False
    kind: Literal["table"] = "table"

    @property
    def known(self) -> Table:
        """Without the columns in which everything is missing."""
        kept = [at for at in range(len(self.columns)) if any(row[at].text != EMPTY for row in self.rows)]
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[at] for at in kept), rows=rows)

    def looks(self, column: int, cell: Cell | None = None) -> str | None:
        """The classes of a cell in the page: a column with numbers is aligned to the right."""
        numeric = any(row[column].value is not None for row in self.rows)
        found = ["number"] * numeric + ["wide"] * (self.columns[column] in self.wide)
        return " ".join(found + ([] if cell is None or cell.tone == "plain" else [cell.tone])) or None


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that can be drawn, and what it says in words and numbers.

    Attributes:
        name: of its file, and of its place in the page: letters, digits, dots and dashes.
        description: the numbers in it, for those who do not see it.
        size_in: width and height in inches.
    """

    name: str
    title: str
    description: str
    data: Table
    draw: Callable[[Figure], None]
    size_in: tuple[float, float]
    kind: Literal["picture"] = "picture"


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    tone: Tone = "plain"
    kind: Literal["sentence"] = "sentence"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste: ``label`` says where."""

    label: str
    text: str
    kind: Literal["code"] = "code"


Part = Table | Picture | Sentence | Code


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a heading; ``tag`` is what has to be known of all of them, '' for nothing."""

    title: str
    parts: tuple[Part, ...]
    tag: str = ""


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case as it is shown.

    Attributes:
        place: its place in the page, and the beginning of its figures' names.
        tags: what has to be known before anything else: emulated compute, not pre-registered.
        setting: what to set, in a few words.
        missing: a sentence for each record that was not found.
    """

    place: str
    title: str
    outcome: str
    sentence: str
    tags: tuple[str, ...]
    setting: str
    missing: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def tone(self) -> Tone:
        return TONES.get(self.outcome, "undecided")

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(part for section in self.sections for part in section.parts if isinstance(part, Picture))


def words(text: str) -> Cell:
    return Cell(plain(text))


def outcome(text: str) -> Cell:
    return Cell(plain(text), tone=TONES.get(text, "undecided"))


def number(value: float | None, form: str = ".4g") -> Cell:
    """A number as a cell; what is missing is a dash, and never 0."""
    return Cell(EMPTY) if value is None else Cell(format(value, form), value)


def estimate(found: Estimate | None, form: str = ".4g") -> Cell:
    """A mean with its interval."""
    return Cell(EMPTY) if found is None else Cell(interval(found.mean, found.low, found.high, form), found.mean)


def interval(mean: float, low: float | None, high: float | None, form: str = ".4g") -> str:
    """``558 [549, 567]``; the mean alone where no interval is stated."""
    return format(mean, form) + ("" if low is None or high is None else f" [{low:{form}}, {high:{form}}]")


def payload(payload_bytes: int) -> str:
    """``588 KiB``; a publication may state none, which is 0 in its records."""
    if not payload_bytes:
        return "payload not stated"
    kib = payload_bytes / _KIB
    return f"{kib:.0f} KiB" if kib >= 10 else f"{kib:.2g} KiB"


def facts(caption: str, rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and what they are."""
    return Table(
        caption,
        ("what", "is"),
        tuple((words(name), words(value)) for name, value in rows),
        wide=frozenset({"is"}),
    )
