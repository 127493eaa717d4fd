"""The server that a calibration or a measurement talks to: embedded and started afresh, or the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from b2gmodel.errors import UsageError
from b2gmodel.live.workloads import WorkloadTable


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server answers HTTP, for the length of a session."""

    host: str
    port: int
    embedded: bool
    table_digest: str | None

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"


class Target(Protocol):
    """Something that can give a session an endpoint; ``restarts`` says whether each session gets a fresh server."""

    @property
    def restarts(self) -> bool: ...

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]: ...


@dataclass(frozen=True, slots=True)
class EmbeddedTarget:
    """The embedded Triton with a table of reference workloads."""

    table: WorkloadTable
    restarts: bool = True

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]:
        return self._session(models)

    @contextmanager
    def _session(self, models: Sequence[str]) -> Iterator[Endpoint]:
        from b2gmodel.live.server import EmbeddedServer

        with EmbeddedServer.start(self.table, models=tuple(models)) as server:
            host, port = server.http_address
            yield Endpoint(host, port, True, self.table.digest)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A running KServe v2 server; sessions differ only in the proxy and the load."""

    host: str
    port: int
    restarts: bool = False

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]:
        return self._session()

    @contextmanager
    def _session(self) -> Iterator[Endpoint]:
        yield Endpoint(self.host, self.port, False, None)


def parse_url(url: str, *, where: str = "--url") -> RemoteTarget:
    """A target from ``http://host:port`` or ``host:port``. Raises ``UsageError``."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit("http://"), None
    plain = parts.scheme == "http" and parts.hostname and port and parts.path in ("", "/") and not parts.query
    if not plain or parts.hostname is None or port is None:
        raise UsageError(
            "not the address of a server",
            observed=url,
            allowed="http://HOST:PORT, with a port from 1 to 65535",
            where=where,
            hint="Triton's HTTP endpoint is port 8000 by default",
        )
    return RemoteTarget(parts.hostname, port)
