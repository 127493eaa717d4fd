"""A null twin of a model on a user's own server: same inputs, nothing computed, for the transport law there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from b2gmodel.errors import ServerError
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.repository import export_null_model
from b2gmodel.live.target import RemoteTarget
from b2gmodel.live.tensors import TensorSpec


async def write_null_twins(target: RemoteTarget, models: Sequence[str], folder: Path) -> list[Path]:
    """Write the twin of each model into a model repository.

    Returns:
        The twins' folders.

    Raises:
        UsageError: no such model, or a twin that is there already or cannot be written.
        ServerError: the server does not describe its models as the protocol says.
    """
    control = ControlPlane(target.host, target.port)
    try:
        described = [await control.describe(model) for model in models]
    finally:
        control.close()
    return [
        _write(model, metadata, config, folder) for model, (metadata, config) in zip(models, described, strict=True)
    ]


def _write(model: str, metadata: dict[str, Any], config: dict[str, Any], folder: Path) -> Path:
    max_batch = int(config.get("max_batch_size", 0))
    try:
        inputs, outputs = (
            [
                # With batching, the metadata's shape starts with the batch dimension.
                TensorSpec(entry["name"], entry["datatype"], tuple(map(int, entry["shape"]))[max_batch > 0 :])
                for entry in metadata[kind]
            ]
            for kind in ("inputs", "outputs")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            "the server's description of the model does not have the form of the KServe v2 protocol",
            observed=f"{type(error).__name__}: {error}",
            where=model,
        ) from error
    return export_null_model(folder, model, inputs, outputs, max_batch)
