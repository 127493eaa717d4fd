"""Writes model repositories: the embedded server's, as texts by path, and a null model for a user's own.

The names of outputs and the parameters of each model say that its compute is emulated. The models' code is
this package's ``emulated_model.py`` and ``null_model.py``, copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.workloads import Role, Workload, WorkloadTable
from b2gmodel.units import ns_from_s

INPUT_NAME: Final = "input"
OUTPUT_NAME: Final = "emulated_output"
COMPUTE: Final = "emulated"

_HERE: Final = Path(__file__).parent
_DATATYPES: Final = frozenset(
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES".split()  # noqa: SIM905
)


def embedded_repository(table: WorkloadTable, names: Sequence[str] | None, import_path: Path) -> Mapping[str, str]:
    """The files of the embedded server's model repository: text by path within it.

    Args:
        table: the workloads.
        names: the workloads to offer; None for all.
        import_path: the folder that holds numpy, which the server's own interpreter may not look into.

    Raises:
        UsageError: a name that the table does not hold, or no name at all.
    """
    if names is not None and not names:
        raise UsageError("no workload to offer", allowed=", ".join(table.names))
    files: dict[str, str] = {}
    for name in dict.fromkeys(table.names if names is None else names):
        for role in Role:
            workload = table[name]
            model = workload.model_name(role)
            files[f"{model}/config.pbtxt"] = _embedded_config(workload, role, table.digest)
            files[f"{model}/1/model.py"] = _model_source(role, import_path)
    return files


def export_null_model(
    folder: Path, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_batch: int
) -> Path:
    """Writes a null twin of a user's model, to drop into the repository of a server with a Python backend.

    Args:
        folder: a model repository, or any folder to copy from; made where missing.
        name: the user's model; its twin is ``NAME_null``.
        inputs, outputs: as in the user's model; -1 is a variable dimension.
        max_batch: the user's model's max_batch_size (0: no batching).

    Returns:
        The folder of the twin.

    Raises:
        UsageError: the twin is there already, cannot be written, or a datatype or dimension is not usable.
    """
    if max_batch < 0:
        raise UsageError("not a batch size", observed=max_batch, allowed="0 or more", where="max batch")
    for spec in (*inputs, *outputs):
        if spec.datatype not in _DATATYPES:
            allowed = ", ".join(sorted(_DATATYPES))
            raise UsageError("not a datatype", observed=spec.datatype, allowed=allowed, where=spec.name)
        if not all(size == -1 or size >= 1 for size in spec.shape):
            allowed = "positive sizes, or -1 where variable"
            raise UsageError("not a shape", observed=list(spec.shape), allowed=allowed, where=spec.name)
    target = folder / f"{name}_{Role.NULL.value}"
    config = _config(inputs, outputs, max_batch, {"b2g_compute": COMPUTE, "b2g_role": Role.NULL.value})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.mkdir()
        (target / "1").mkdir()
        (target / "config.pbtxt").write_text(config)
        (target / "1" / "model.py").write_text((_HERE / "null_model.py").read_text())
    except FileExistsError as error:
        raise UsageError(
            "the null model is there already", observed=str(target), hint="remove it or name another folder"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write the null model ({error.strerror or error})", observed=str(target)) from error
    return target


def _model_source(role: Role, import_path: Path) -> str:
    """A model's code, able to import numpy wherever the server's interpreter looks by default."""
    source = (_HERE / ("null_model.py" if role is Role.NULL else "emulated_model.py")).read_text()
    # The future import has to come first in a module: it is the one line that may not follow ours.
    future = "from __future__ import annotations\n"
    return source.replace(future, f"{future}\nimport sys\n\nsys.path.insert(0, {str(import_path)!r})\n", 1)


def _embedded_config(workload: Workload, role: Role, digest: str) -> str:
    computes = role is not Role.NULL
    parameters = {
        "b2g_compute": COMPUTE,
        "b2g_role": role.value,
        "b2g_workload": workload.name,
        "b2g_s0_ns": str(ns_from_s(workload.s0_s) if computes else 0),
        "b2g_s1_ns": str(ns_from_s(workload.s1_s) if computes else 0),
        "b2g_table_digest": digest,
    }
    config = _config(
        [TensorSpec(INPUT_NAME, workload.datatype, workload.input_shape)],
        [TensorSpec(OUTPUT_NAME, "FP32", workload.output_shape)],
        workload.max_batch,
        parameters,
        workload.instances,
    )
    return config + ("dynamic_batching { }\n" if role is Role.DYNAMIC else "")


def _config(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch: int,
    parameters: Mapping[str, str],
    instances: int = 1,
) -> str:
    """A model configuration in protobuf text form."""
    lines = ['backend: "python"', f"max_batch_size: {max_batch}"]
    for kind, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            datatype = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            lines.append(f"{kind} {{ name: {json.dumps(spec.name)} data_type: {datatype} dims: {list(spec.shape)} }}")
    lines.append(f"instance_group {{ kind: KIND_CPU count: {instances} }}")
    for key, value in parameters.items():
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}")
    return "\n".join(lines) + "\n"
