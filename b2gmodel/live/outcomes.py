"""How a request fails, as a client sees it: one exception for each error code, one for the connection."""
# ruff: noqa: N818 - named for what happened, as a caller reads them in an except clause

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from b2gmodel.errors import B2GError, UsageError
from b2gmodel.live.messages import ErrorCode, Failure, Limits


class RequestError(B2GError):
    """A request that has no result; the subclass says why."""

    exit_code: ClassVar[int] = 3


class Busy(RequestError):
    """The proxy's queue is full; ask again later."""


class DeadlineExceeded(RequestError):
    """The deadline passed at the proxy, or no answer came within the client's own ``timeout_s``."""


class Malformed(RequestError):
    """The proxy could not read what was sent."""


class UpstreamFailed(RequestError):
    """The inference server behind the proxy failed."""


class Draining(RequestError):
    """The proxy is shutting down."""


class Refused(RequestError):
    """The proxy does not serve this model, or not with these inputs."""


class Cancelled(RequestError):
    """The request was withdrawn."""


class InternalFailure(RequestError):
    """The proxy itself failed."""


class ConnectionLost(RequestError):
    """There is no connection, it ended before the answer, or what came over it was not the protocol."""


_ERRORS: Final[dict[ErrorCode, type[RequestError]]] = {
    ErrorCode.BUSY: Busy,
    ErrorCode.DEADLINE: DeadlineExceeded,
    ErrorCode.MALFORMED: Malformed,
    ErrorCode.UPSTREAM: UpstreamFailed,
    ErrorCode.DRAINING: Draining,
    ErrorCode.REFUSED: Refused,
    ErrorCode.CANCELLED: Cancelled,
    ErrorCode.INTERNAL: InternalFailure,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a client talks to and how, with the errors that name it."""

    host: str
    port: int
    timeout_s: float
    limits: Limits

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise UsageError("a timeout must be positive", observed=self.timeout_s, allowed="> 0 s", where="timeout_s")

    def __str__(self) -> str:
        return f"proxy {self.host}:{self.port}"

    def failed(self, failure: Failure) -> RequestError:
        return _ERRORS[failure.code](failure.message or failure.code.name.lower(), where=str(self))

    def lost(self, reason: object) -> ConnectionLost:
        text = reason.line() if isinstance(reason, B2GError) else str(reason)
        return ConnectionLost(f"connection lost: {text}", where=str(self))

    def unreachable(self, reason: object) -> ConnectionLost:
        return ConnectionLost(f"no connection: {reason}", where=str(self), hint="is `b2g serve` running there?")

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded("no answer in time", allowed=f"{self.timeout_s:g} s", where=str(self))
