"""The server that a calibration or a measurement talks to: embedded and started afresh, or the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from b2gmodel.errors import UsageError
from b2gmodel.live.engines import Emulated, Engine, Wish, find_engine
from b2gmodel.live.workloads import WorkloadTable, load_workloads


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server answers HTTP, for the length of a session; and gRPC, where that is known."""

    host: str
    port: int
    embedded: bool
    table_digest: str | None
    grpc_port: int | None = None
    trace_file: Path | None = None

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class Target(Protocol):
    """Something that can give a session an endpoint; ``restarts`` says whether each session gets a fresh server."""

    @property
    def restarts(self) -> bool: ...

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]: ...


@dataclass(frozen=True, slots=True)
class EmbeddedTarget:
    """The embedded Triton with a table of reference workloads, emulated where no engine is named."""

    table: WorkloadTable
    restarts: bool = True
    engine: Engine | None = None

    @classmethod
    def of(cls, compute: Emulated | Wish) -> EmbeddedTarget:
        """What ``--compute`` asks for. Raises ``UsageError`` and ``SetupError`` as the table and the engine do."""
        if isinstance(compute, Emulated):
            return cls(load_workloads(compute.table))
        return cls(load_workloads(), engine=find_engine(compute))

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]:
        return self._session(models)

    @contextmanager
    def _session(self, models: Sequence[str]) -> Iterator[Endpoint]:
        from b2gmodel.live.server import EmbeddedServer

        # NAME_dynamic and NAME_null are entries of the workload NAME.
        workloads = dict.fromkeys(model.removesuffix("_dynamic").removesuffix("_null") for model in models)
        with EmbeddedServer.start(self.table, models=tuple(workloads), engine=self.engine) as server:
            host, port = server.http_address
            yield Endpoint(host, port, True, self.table.digest, server.grpc_address[1], server.trace_file)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A running KServe v2 server; sessions differ only in the proxy and the load."""

    host: str
    port: int
    restarts: bool = False
    grpc_port: int | None = None
    trace_file: Path | None = None

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]:
        return self._session()

    @contextmanager
    def _session(self) -> Iterator[Endpoint]:
        yield Endpoint(self.host, self.port, False, None, self.grpc_port, self.trace_file)


def parse_url(url: str, *, where: str = "--url", grpc_url: str | None = None) -> RemoteTarget:
    """A target from ``http://host:port`` or ``host:port``, and its gRPC endpoint from ``host:port``.

    Raises:
        UsageError: not an address, or two hosts where one server is meant.
    """
    allowed = "http://HOST:PORT, with a port from 1 to 65535"
    hint = "Triton's HTTP endpoint is port 8000 by default"
    host, port = _host_and_port(url if "://" in url else f"http://{url}", url, where, allowed, hint)
    if grpc_url is None:
        return RemoteTarget(host, port)
    allowed, hint = "HOST:PORT, with a port from 1 to 65535", "Triton's gRPC endpoint is port 8001 by default"
    grpc_host, grpc_port = _host_and_port(f"http://{grpc_url}", grpc_url, "--grpc-url", allowed, hint)
    if grpc_host != host:
        raise UsageError(
            "the gRPC address is another host's", observed=grpc_url, allowed=f"{host}:PORT", where="--grpc-url"
        )
    return RemoteTarget(host, port, grpc_port=grpc_port)


def _host_and_port(text: str, given: str, where: str, allowed: str, hint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit("http://"), None
    plain = parts.scheme == "http" and parts.path in ("", "/") and not parts.query
    if not plain or not parts.hostname or not port:
        raise UsageError("not the address of a server", observed=given, allowed=allowed, where=where, hint=hint)
    return parts.hostname, port
