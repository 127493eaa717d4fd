"""Write docs/reference/ from the code: the command line, the records, the library.

python tools/reference.py [--check]

``--check`` writes nothing, and exits 1 where a page is not what this command makes.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

import b2gmodel
from b2gmodel import placement_records, records, study_records
from b2gmodel.cli import app

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
COMMAND: Final = "python tools/reference.py"
_MADE: Final = f"<!-- made by `{COMMAND}` -->"
_WIDTH: Final = 80
_UNITS: Final = (("_per_s", "1/s"), ("_bytes", "byte"), ("_kib", "KiB"), ("_ns", "ns"), ("_ms", "ms"), ("_s", "s"))

_COMMAND_LINE: Final = f"""# Command line

{_MADE}

What `--help` says, command by command. Results are on stdout, progress and errors on stderr; `--json` gives one object
with stable keys. A time is a number with its unit: ns, us, ms, s or min.

| exit code | means |
|---|---|
| 0 | held, or done |
| 1 | refuted |
| 2 | wrong use, or something needed is missing |
| 3 | evidence invalid, tampered with, or inconclusive |
| 4 | internal failure |
| 130 | interrupted by Ctrl-C |

`b2g --install-completion` lets the shell complete commands, options, models and studies.
"""

_RECORDS: Final = f"""# Records

{_MADE}

A record is one JSON file, frozen and versioned. Its digest is the SHA-256 of its canonical JSON (RFC 8785). Fields that
are not known are refused, and so is a value of another type than the one stated. A value that is not known is `null`,
never 0, except where a default stands. Names state their units: `_s` is seconds, `_ns` nanoseconds, `_per_s` 1/s.

The same as JSON schema, for other programs:

```python
from b2gmodel import Calibration
from b2gmodel.records import json_schema

print(json_schema(Calibration)["required"][:3])
```
```text
['name', 'source', 'host']
```
"""

_LIBRARY: Final = f"""# Library

{_MADE}

`from b2gmodel import ...` gives the names below; each is loaded when it is first asked for.
"""


def pages() -> dict[str, str]:
    """File name -> text of each page."""
    return {"cli.md": command_line(), "records.md": record_tables(), "library.md": library()}


def command_line() -> str:
    """The page of all commands: the parser's own help at a width of 80."""
    parts = [_COMMAND_LINE]
    for path, command in _commands(typer.main.get_command(app), "b2g"):
        context = command.make_context(
            path, [], resilient_parsing=True, terminal_width=_WIDTH, max_content_width=_WIDTH
        )
        usage = context.get_help().replace("\r", "")
        parts.append(f"\n## {path}\n\n```text\n{usage.rstrip()}\n```\n")
    return "".join(parts)


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, f"{path} {name}")


def top_records() -> list[type[records.Record]]:
    """The records that are files of their own: those that state their kind."""
    modules = (records, placement_records, study_records)
    found = [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, records.Record) and each.__module__ == module.__name__
    ]
    return [each for each in found if "record" in each.model_fields]


def record_tables() -> str:
    """The page of all records, and of the parts that they are made of, a table each."""
    parts: dict[str, dict[str, Any]] = {}
    text = [_RECORDS]
    for top in top_records():
        schema = records.json_schema(top)
        parts |= schema.pop("$defs", {})
        text.append(f"\n## {top.__name__}\n\n`{top.model_fields['record'].default}`. {_fields(schema)}")
    text.append("\n## Parts of records\n")
    text += [f"\n### {name}\n\n{_fields(schema)}" for name, schema in sorted(parts.items())]
    return "".join(text)


def _fields(schema: dict[str, Any]) -> str:
    about = " ".join(schema.get("description", "").replace("``", "`").split())
    required = set(schema.get("required", ()))
    rows = [
        f"| `{name}` | {_type(field)} | {_unit(name)} | {_default(name, field, required)} |"
        for name, field in schema["properties"].items()
    ]
    return "\n".join([about, "", "| field | type | unit | if absent |", "|---|---|---|---|", *rows, ""])


def _unit(name: str) -> str:
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "")


def _default(name: str, field: dict[str, Any], required: set[str]) -> str:
    if name in required:
        return "needed"
    return f"`{_json(field.get('default'))}`"


def _json(value: object) -> str:
    return json.dumps(value).replace("|", "\\|")


def _type(field: dict[str, Any]) -> str:
    """A type and its limits in words."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field or "oneOf" in field:
        return " or ".join(_type(each) for each in field.get("anyOf", field.get("oneOf")))
    if "const" in field:
        return f"`{_json(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{_json(value)}`" for value in field["enum"])
    if field.get("type") == "array":
        if "prefixItems" in field:
            return f"list: {', '.join(map(_type, field['prefixItems']))}"
        inner = field.get("items", {})
        count = {"minItems": "at least {} of ", "maxItems": "at most {} of "}
        limits = "".join(text.format(field[key]) for key, text in count.items() if key in field)
        return f"list: {limits}{_type(inner)}"
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) else "object"
    if field.get("pattern"):
        return f"string `{field['pattern']}`".replace("|", "\\|")
    words = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}
    limits = [text.format(field[key]) for key, text in words.items() if key in field]
    return " ".join([str(field.get("type", "any")), ", ".join(limits)]).strip()


def library() -> str:
    """The page of the public names: signatures and docstrings."""
    parts = [_LIBRARY]
    for name in b2gmodel.__all__:
        thing = getattr(b2gmodel, name)
        parts.append(_entry("##", name, thing))
        if isinstance(thing, type):
            parts += [
                _entry("###", f"{name}.{method}", value)
                for method, value in vars(thing).items()
                if not method.startswith("_") and inspect.isfunction(value) and value.__doc__
            ]
    return "".join(parts)


def _entry(level: str, name: str, thing: Any) -> str:
    if isinstance(thing, type) and issubclass(thing, records.Record):
        how = f"A [record](records.md#{name.lower()})."
    else:
        how = f"```text\n{_signature(name.rsplit('.', 1)[-1], thing)}\n```"
    return f"\n{level} {name}\n\n{how}\n\n{_docstring(thing)}\n"


def _signature(name: str, thing: Any) -> str:
    text = f"{name}{inspect.signature(thing)}".replace("'", "").removesuffix(" -> None")
    return text if len(text) <= _WIDTH else re.sub(r"(\(|, )(?=\*?\w+(?::|,|\)))", _broken, text)


def _broken(place: re.Match[str]) -> str:
    return f"{place[1].rstrip()}\n    "


def _docstring(thing: Any) -> str:
    """Sections (Args, Returns, Raises) become lists."""
    lines: list[str] = []
    section = ""
    for line in (inspect.getdoc(thing) or "").replace("``", "`").splitlines():
        if heading := re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line):
            section = heading[1]
            lines += [f"**{section}**", ""]
        elif section and re.match(r"    \S", line):
            lines.append(f"- {line.strip()}")
        elif section and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Write the pages, or check them; the exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for name, text in pages().items():
        file = folder / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not arguments:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    print(
        f"not what the code says: {', '.join(stale)}; {COMMAND}" if arguments and stale else f"{folder.name}: as made"
    )
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
