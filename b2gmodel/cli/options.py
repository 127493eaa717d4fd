"""Options that several commands share, and how their text is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from b2gmodel.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress or live view on stderr.")]
PredictionsFolder = Annotated[
    Path, typer.Option("--predictions", help="Folder of frozen predictions and their ledger.")
]
CalibrationFolder = Annotated[Path, typer.Option("--out", help="Folder that the record is written to.")]
Compute = Annotated[
    str,
    typer.Option(
        "--compute",
        help="What the embedded server computes: 'emulated', 'emulated:FILE' with a table of your own, or for real "
        "with 'onnx' or 'torch' (onnx:cuda, torch:cpu,threads=2).",
    ),
]
Url = Annotated[
    str | None,
    typer.Option("--url", help="A running KServe v2 server, http://HOST:PORT. Default: the embedded Triton."),
]

GrpcUrl = Annotated[
    str | None, typer.Option("--grpc-url", help="The server's gRPC endpoint, HOST:PORT, for --transport grpc.")
]
AllowedSigners = Annotated[
    Path | None,
    typer.Option(
        "--allowed-signers",
        help="Who may sign, in OpenSSH's format; what is not signed by one of them is refused.",
    ),
]


_MOST_COUNTS: Final = 256
_LARGEST_COUNT: Final = 65_536
LARGEST_SEED: Final = 2**53 - 1
"""The largest whole number that canonical JSON holds exactly."""


TlsCert = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="Own certificate chain, PEM.", show_default=False)
]
TlsKey = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM, without a passphrase.")]


def one_of(*values: str) -> Callable[[], list[str]]:
    """What the shell completes an option with."""
    return lambda: list(values)


def workload_names() -> list[str]:
    """The embedded server's models, for the shell to complete."""
    from b2gmodel.live.workloads import load_workloads

    return list(load_workloads().names)


def parse_counts(text: str, *, where: str) -> tuple[int, ...]:
    """Distinct positive whole numbers from ``1,2,4``, in increasing order. Raises ``UsageError``."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    in_range = all(1 <= number <= _LARGEST_COUNT for number in numbers)
    if not in_range or not 1 <= len(set(numbers)) == len(numbers) <= _MOST_COUNTS:
        raise UsageError(
            "not a list of batch sizes or flights",
            observed=text,
            allowed=f"distinct whole numbers from 1 to {_LARGEST_COUNT}, separated by commas, {_MOST_COUNTS} at most",
            where=where,
            hint=f"write, for example, {where} 1,2,4,8",
        )
    return tuple(sorted(numbers))


def parse_shapes(texts: list[str], *, where: str = "--shape") -> dict[str, tuple[int, ...]]:
    """Input name -> dimensions from ``NAME:3,224,224``. Raises ``UsageError``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        try:
            shape = tuple(int(dim) for dim in dims.replace("x", ",").split(","))
        except ValueError:
            shape = ()
        if not name or not shape or min(shape) < 1 or name in shapes:
            raise UsageError(
                "not a shape",
                observed=text,
                allowed="NAME:DIM,DIM,..., each input once, dimensions of at least 1, without the batch dimension",
                where=where,
                hint="write, for example, --shape input:3,224,224",
            )
        shapes[name] = shape
    return shapes
