"""TLS between clients and the proxy: contexts from files.

Rules of this module:

* TLS 1.2 at least; a client always checks the proxy's certificate, and the proxy its clients' where it has a CA.
* A private key that needs a passphrase is refused: a service has nobody to ask.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from b2gmodel.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: its certificate chain, its key, and who may sign its clients' (None: anybody comes in)."""

    certificate: str
    key: str
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises ``UsageError`` for a file that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_own(context, self.certificate, self.key)
        if self.client_ca is not None:
            _load_ca(context, self.client_ca, "--tls-client-ca")
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: who may sign the proxy's certificate, and its own certificate and key, if it has any."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    ca: str
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "a certificate and its key go together", where="--tls-cert, --tls-key", hint="give both, or neither"
            )

    def context(self) -> ssl.SSLContext:
        """Raises ``UsageError`` for a file that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_ca(context, self.ca, "--tls-ca")
        if self.certificate is not None and self.key is not None:
            _load_own(context, self.certificate, self.key)
        return context


def _load_own(context: ssl.SSLContext, certificate: str, key: str) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _said("the certificate or its key cannot be used", f"{certificate}, {key}", "--tls-cert, --tls-key"):
        context.load_cert_chain(certificate, key, password=_refuse)


def _load_ca(context: ssl.SSLContext, file: str, where: str) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _said("the certificate authority cannot be used", file, where):
        context.load_verify_locations(file)


def _refuse() -> str:
    raise UsageError(
        "the key needs a passphrase, and there is nobody to ask",
        where="--tls-key",
        hint="decrypt it, and let its file's permissions protect it",
    )


@contextmanager
def _said(problem: str, observed: str, where: str) -> Iterator[None]:
    """A file's own error as ours."""
    try:
        yield
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise UsageError(
            f"{problem} ({reason})", observed=observed, allowed="PEM files that fit each other", where=where
        ) from error
