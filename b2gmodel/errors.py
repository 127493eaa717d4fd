"""One exception tree. Each error says what was seen, what is allowed, where, and what to do, in one line.

The type says whose fault it is: ``UsageError`` the caller's, ``ServerError`` the peer's, ``EvidenceError`` the
records'. Anything else that reaches the command line is ours and exits 4; none becomes a favourable answer.
"""

from __future__ import annotations

from typing import ClassVar


class B2GError(Exception):
    """An error with its facts as attributes.

    Attributes:
        problem: what is wrong, a clause without a full stop.
        observed: what was seen (None where nothing can be shown).
        allowed: the bound or the allowed values (None where there is none).
        where: the option, file or field that held it.
        hint: what to do next.
    """

    exit_code: ClassVar[int] = 4

    def __init__(
        self,
        problem: str,
        *,
        observed: object = None,
        allowed: str | None = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.observed = observed
        self.allowed = allowed
        self.where = where
        self.hint = hint
        super().__init__(self.line())

    def line(self) -> str:
        """The error as one line: ``where: problem: saw X; allowed: Y; hint``. Line breaks are folded."""
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        parts = [head]
        if self.observed is not None:
            parts[0] += f": saw {self.observed if not isinstance(self.observed, str) else repr(self.observed)}"
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.hint:
            parts.append(self.hint)
        return " ".join("; ".join(parts).split())


class UsageError(B2GError):
    """The caller asked for something that cannot be: a bad option, name, file, or a server that is not there."""

    exit_code: ClassVar[int] = 2


class EvidenceError(B2GError):
    """A record is damaged, tampered with, out of chain, or too thin to carry a verdict."""

    exit_code: ClassVar[int] = 3


class ServerError(B2GError):
    """The inference server failed, or answered what its protocol does not allow, while we depended on it."""

    exit_code: ClassVar[int] = 3


class SetupError(B2GError):
    """Something that this machine needs is missing or failed to start; the hint says how to get it."""

    exit_code: ClassVar[int] = 2
