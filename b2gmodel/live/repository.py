"""Writes model repositories: the embedded server's, as texts by path, and a null model for a user's own.

The names of outputs and the parameters of each model say whether its compute is emulated or real. The models' code is
this package's ``emulated_model.py``, ``real_model.py`` and ``null_model.py``, copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.live.engines import Engine
from b2gmodel.live.model_cache import ModelFile
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.workloads import REAL_OUTPUT_NAME, Role, Workload, WorkloadTable
from b2gmodel.units import ns_from_s

INPUT_NAME: Final = "input"
OUTPUT_NAME: Final = "emulated_output"
COMPUTE: Final = "emulated"

_HERE: Final = Path(__file__).parent
_DATATYPES: Final = frozenset(
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES".split()  # noqa: SIM905
)


def embedded_repository(
    table: WorkloadTable,
    names: Sequence[str] | None,
    import_path: Path,
    engine: Engine | None = None,
    models: Mapping[str, ModelFile] | None = None,
    engine_paths: Sequence[Path] = (),
) -> Mapping[str, str]:
    """The files of the embedded server's model repository: text by path within it.

    Args:
        table: the workloads.
        names: the workloads to offer; None for all.
        import_path: the folder that holds numpy, which the server's own interpreter may not look into.
        engine: what computes; None for emulation.
        models: for an engine, each workload's model file; ``model_links`` says where it has to lie.
        engine_paths: for an engine, more folders that hold packages.

    Raises:
        UsageError: a name that the table does not hold, or no name at all.
    """
    files: dict[str, str] = {}
    for workload in offered(table, names):
        for role in Role:
            model = workload.model_name(role)
            if engine is None or models is None:
                config = _emulated_config(workload, role, table.digest)
                source = "emulated_model.py"
            else:
                config = _real_config(workload, role, table.digest, engine, models[workload.name])
                source = "real_model.py"
            files[f"{model}/config.pbtxt"] = config
            files[f"{model}/1/model.py"] = _source(
                "null_model.py" if role is Role.NULL else source, (import_path, *engine_paths)
            )
            if engine is not None and engine.name == "torch" and role is not Role.NULL:
                files[f"{model}/1/torch_graph.py"] = (_HERE / "torch_graph.py").read_text()
    return files


def offered(table: WorkloadTable, names: Sequence[str] | None) -> tuple[Workload, ...]:
    """The workloads of these names, each once; all for None. Raises ``UsageError`` for an unknown one, or none."""
    if names is not None and not names:
        raise UsageError("no workload to offer", allowed=", ".join(table.names))
    return tuple(table[name] for name in dict.fromkeys(table.names if names is None else names))


def model_links(models: Mapping[str, ModelFile], table: WorkloadTable) -> Mapping[str, str]:
    """Where real models have to lie in the repository, and the files that they are."""
    return {
        f"{table[name].model_name(role)}/1/model.onnx": str(file.path)
        for name, file in models.items()
        for role in (Role.UNBATCHED, Role.DYNAMIC)
    }


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


def _source(file: str, import_paths: Sequence[Path]) -> str:
    """A model's code, able to import what it needs wherever the server's interpreter looks by default."""
    source = (_HERE / file).read_text()
    # The future import has to come first in a module: it is the one line that may not follow ours.
    future = "from __future__ import annotations\n"
    folders = list(dict.fromkeys(map(str, import_paths)))
    return source.replace(future, f"{future}\nimport sys\n\nsys.path[:0] = {folders!r}\n", 1)


def _emulated_config(workload: Workload, role: Role, digest: str) -> str:
    computes = role is not Role.NULL
    times = {
        "b2g_s0_ns": str(ns_from_s(workload.s0_s) if computes else 0),
        "b2g_s1_ns": str(ns_from_s(workload.s1_s) if computes else 0),
    }
    return _embedded_config(workload, role, digest, COMPUTE, times, OUTPUT_NAME)


def _real_config(workload: Workload, role: Role, digest: str, engine: Engine, file: ModelFile) -> str:
    """The null entry says that nothing is computed; the others which engine computes what."""
    if role is Role.NULL:
        return _embedded_config(workload, role, digest, "none", {}, REAL_OUTPUT_NAME)
    facts = {
        "b2g_engine": engine.name,
        "b2g_engine_version": engine.version,
        "b2g_provider": engine.provider,
        "b2g_device_name": engine.device_name or "",
        "b2g_threads": str(engine.threads),
        "b2g_model_digest": file.digest,
    }
    return _embedded_config(workload, role, digest, "real", facts, REAL_OUTPUT_NAME)


def _embedded_config(
    workload: Workload, role: Role, digest: str, compute: str, facts: Mapping[str, str], output: str
) -> str:
    parameters = {
        "b2g_compute": compute,
        "b2g_role": role.value,
        "b2g_workload": workload.name,
        **facts,
        "b2g_table_digest": digest,
    }
    config = _config(
        [TensorSpec(INPUT_NAME, workload.datatype, workload.input_shape)],
        [TensorSpec(output, "FP32", workload.output_shape)],
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
