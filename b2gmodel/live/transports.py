"""The transports by name, each made only where it is asked for."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.target import Endpoint
from b2gmodel.live.transport import HttpTransport, Transport


class TransportName(StrEnum):
    """How batches travel to the server; the values of ``--transport``."""

    HTTP = "http"
    """Gathered onto the socket from the requests' own buffers."""
    GRPC = "grpc"
    """Over the server's gRPC endpoint."""
    SHM = "shm"
    """Through shared memory, where proxy and server share a host."""


DEFAULT_TRANSPORT: Final = TransportName.HTTP


def check_transport(name: str, endpoint: Endpoint) -> None:
    """Raises ``UsageError``: no such transport, or ``grpc`` to a server whose gRPC port is not known."""
    if name not in set(TransportName):
        raise UsageError("no such transport", observed=name, allowed=", ".join(TransportName), where="--transport")
    if name == TransportName.GRPC and endpoint.grpc_port is None:
        raise UsageError(
            "the server's gRPC address is not known",
            where="--transport grpc",
            hint=f"give it, for example --grpc-url {endpoint.host}:8001",
        )


def make_transport(name: str, endpoint: Endpoint, model: ModelSpec) -> Transport:
    """The transport of that name to a server's model. Raises ``UsageError`` as ``check_transport``."""
    check_transport(name, endpoint)
    match TransportName(name):
        case TransportName.HTTP:
            return HttpTransport(endpoint.host, endpoint.port, model)
        case TransportName.GRPC:
            from b2gmodel.live.grpc_transport import GrpcTransport

            assert endpoint.grpc_port is not None
            return GrpcTransport(endpoint.host, endpoint.grpc_port, model)
        case TransportName.SHM:
            from b2gmodel.live.shm_transport import ShmTransport

            return ShmTransport(endpoint.host, endpoint.port, model)
