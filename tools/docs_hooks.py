"""What the site needs beyond docs/: pages that live elsewhere, links out of docs/, and patterns in the navigation.

Pages are written for a Git host, where every link is relative within the repository. On the site a link to a page
becomes a link to that page, wherever its file lies; a link to any other file of the repository becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
# Pages of the site whose files lie outside docs/: the page -> the file.
ELSEWHERE: Final = {
    "readme-page.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
}
_PAGE_OF: Final = {file: page for page, file in ELSEWHERE.items()}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]*`)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put files in the place of patterns in the navigation."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(entries: Any, docs: Path) -> Any:
    if isinstance(entries, dict):
        return {name: _expanded(entry, docs) for name, entry in entries.items()}
    if not isinstance(entries, list):
        return entries
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            found += sorted(str(path.relative_to(docs)) for path in docs.glob(entry))
        else:
            found.append(_expanded(entry, docs))
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files lie elsewhere."""
    for page, file in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """The text of ``page`` (its path on the site) with its links as they are on the site."""
    held: list[str] = []

    def hold(code: re.Match[str]) -> str:
        held.append(code[0])
        return f"\0{len(held) - 1}\0"

    # What is quoted as code stays as it is.
    text = _LINK.sub(lambda link: _on_site(link, page), _CODE.sub(hold, markdown))
    return re.sub("\0(\\d+)\0", lambda place: held[int(place[1])], text)


def _on_site(link: re.Match[str], page: str) -> str:
    text, target = link[1], link[2]
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return link[0]
    file = posixpath.normpath(posixpath.join(posixpath.dirname(ELSEWHERE.get(page, f"docs/{page}")), path))
    if (ROOT / file).is_dir() and (ROOT / file / "README.md").is_file():
        file = f"{file}/README.md"
    if file in _PAGE_OF:
        on_site = _PAGE_OF[file]
    elif file.startswith("docs/"):
        on_site = file.removeprefix("docs/")
    elif (ROOT / file).exists():
        return f'<span class="repository-file" title="{file} in the repository">{text}</span>'
    else:
        return link[0]
    return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{hash_}{anchor})"
