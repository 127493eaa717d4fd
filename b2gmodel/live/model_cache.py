"""The reference workloads' real models as files: built once, kept by what they are made from and what they hold.

A file's name carries both digests: a changed builder makes another file, and one whose bytes do not match its name is
built again. Files lie in the user's cache folder, never beside the package. Nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from b2gmodel.errors import SetupError, UsageError
from b2gmodel.live.workloads import Workload

if TYPE_CHECKING:
    import onnx

SEED: Final = 1
MODULES: Final[Mapping[str, str]] = {
    "resnet50": "onnx_resnet",
    "mobilenetv2": "onnx_mobilenet",
    "yolov5s": "onnx_yolo",
    "yolov8n": "onnx_yolo",
}
"""Where the function of each workload's name is."""

_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An ONNX file and the SHA-256 of its bytes."""

    path: Path
    digest: str


def cache_folder() -> Path:
    """Where models are kept: ``b2gmodel/models`` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "b2gmodel" / "models"


def builder_of(name: str) -> Callable[[Sequence[int], int], onnx.ModelProto]:
    """The function that builds a workload's real model from its input shape and a seed.

    Raises:
        UsageError: a workload that has no real model.
        SetupError: the package onnx is not installed.
    """
    if name not in MODULES:
        raise UsageError(
            "the workload has no real model",
            observed=name,
            allowed=", ".join(MODULES),
            hint="a workload of your own can be emulated: --compute emulated:FILE",
        )
    try:
        module = import_module(f"b2gmodel.live.{MODULES[name]}")
    except ModuleNotFoundError as error:
        raise SetupError(
            "a real model is built with the package onnx",
            observed=f"no package {error.name}",
            hint="pip install 'b2gmodel[triton]'",
        ) from error
    build: Callable[[Sequence[int], int], onnx.ModelProto] = getattr(module, name)
    return build


def model_file(workload: Workload, folder: Path | None = None) -> ModelFile:
    """The workload's real model, built where no intact file of it is there.

    Raises:
        UsageError, SetupError: as ``builder_of``, or the folder cannot be written.
    """
    build = builder_of(workload.name)
    kept = cache_folder() if folder is None else folder
    stem = f"{workload.name}-{_recipe(workload)[:16]}"
    for path in sorted(kept.glob(f"{stem}-*.onnx")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.stem == f"{stem}-{digest}":
            return ModelFile(path, digest)
    content = build(workload.input_shape, SEED).SerializeToString(deterministic=True)
    digest = hashlib.sha256(content).hexdigest()
    path = kept / f"{stem}-{digest}.onnx"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        _write(path, content)
    except OSError as error:
        raise SetupError(
            f"cannot keep the model's file ({error.strerror or error})",
            observed=str(kept),
            hint="name a folder with room: XDG_CACHE_HOME=FOLDER",
        ) from error
    return ModelFile(path, digest)


def _recipe(workload: Workload) -> str:
    """A digest of all that the bytes follow from: builders, shape, seed, and the packages that draw and write."""
    sources = [(_HERE / f"{name}.py").read_bytes() for name in ("onnx_graphs", MODULES[workload.name])]
    words = [workload.name, str(workload.input_shape), str(SEED), _version("numpy"), _version("onnx")]
    return hashlib.sha256(b"\0".join([*sources, *(word.encode() for word in words)])).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _write(path: Path, content: bytes) -> None:
    """All or nothing: another process may look at the same moment."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:32]}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
