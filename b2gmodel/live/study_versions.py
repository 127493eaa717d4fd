"""Which version of each placement is at hand: one digest of its code, its settings and the packages it runs on.

A study's manifest holds these digests. Runs of two versions are never mixed, so a change to one of the files below
asks for a new study.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import rfc8785

from b2gmodel.errors import EvidenceError
from b2gmodel.live import study_take
from b2gmodel.live.host import describe_software
from b2gmodel.study_records import Clients, PlacementName, Study

_PACKAGE: Final = Path(__file__).parents[1]

# What a request passes through, by path in the package.
_TRANSPORT: Final = (
    "flights.py", "live/gather.py", "live/grpc_transport.py", "live/http.py", "live/http_pool.py", "live/infer.py",
    "live/payloads.py", "live/run_loop.py", "live/shared_memory.py", "live/shm_transport.py", "live/tensors.py",
    "live/transport.py", "live/transports.py",
)  # fmt: skip
_TAKING: Final = ("live/bench.py", "live/study_process.py", "live/study_take.py")
_GATEWAY: Final = ("batcher.py", "live/gateway.py")
_DIRECT: Final = ("live/direct.py",)
_PROXY: Final = (
    "live/arrays.py", "live/connection.py", "live/contract.py", "live/load.py", "live/load_lane.py",
    "live/load_plan.py", "live/load_process.py", "live/load_tally.py", "live/load_timer.py", "live/messages.py",
    "live/pool.py", "live/proxy.py", "live/wire.py",
)  # fmt: skip


def files_of(placement: PlacementName, clients: Clients) -> tuple[str, ...]:
    """The package's files that a placement runs through."""
    own = _DIRECT if placement == "D0" else _GATEWAY
    return (*_TRANSPORT, *_TAKING, *own, *(_PROXY if clients == "process" else ()))


@cache
def version_of(placement: PlacementName, clients: Clients) -> str:
    """SHA-256 over a placement's files, its settings, and the versions of Python and packages, in canonical JSON."""
    software = describe_software()
    content = {
        "placement": placement,
        "clients": clients,
        "files": {name: _sha256(name) for name in files_of(placement, clients)},
        "settings": study_take.SETTINGS[clients],
        "python": software.python,
        "packages": software.packages,
    }
    return hashlib.sha256(rfc8785.dumps(content)).hexdigest()


def check_versions(study: Study, *, where: str) -> None:
    """Raises ``EvidenceError`` where a placement's code is no longer that of the study's manifest."""
    for each in study.placements:
        now = version_of(each.placement, study.clients)
        if now != each.digest:
            raise EvidenceError(
                f"the code or the packages of placement {each.placement} are not those that the study was planned with",
                observed=now[:12],
                allowed=each.digest[:12],
                where=where,
                hint="two versions are never mixed in one study: go back to the other, or plan a new study",
            )


def _sha256(name: str) -> str:
    return hashlib.sha256((_PACKAGE / name).read_bytes()).hexdigest()
