"""Signatures of frozen predictions, made and checked by OpenSSH's own ``ssh-keygen -Y``.

The namespace is ours alone, so that a signature made for another purpose, such as a commit, is none of a prediction.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from b2gmodel.errors import EvidenceError, SetupError, UsageError

NAMESPACE: Final = "b2g-prediction@b2gmodel"
PROGRAM: Final = "ssh-keygen"
_FINGERPRINT: Final = re.compile(r"^Good .* key (SHA256:[A-Za-z0-9+/]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature in OpenSSH's armoured form, and the fingerprint of the key that made it."""

    content: bytes
    signer: str


def sign(content: bytes, key: Path) -> Signature:
    """Sign ``content``. A passphrase is asked for on the terminal; a public key means its private half in the agent.

    Raises:
        SetupError: there is no ssh-keygen.
        UsageError: the key cannot be used.
    """
    check_readable(key, "--sign")
    done = _run(["-Y", "sign", "-f", str(key), "-n", NAMESPACE], content)
    if done.returncode != 0 or not done.stdout:
        raise UsageError(
            "the key does not sign",
            observed=_last_line(done),
            where=str(key),
            hint="give a private key, or a public key whose private half is in the SSH agent; "
            "ssh-keygen -t ed25519 makes one",
        )
    return Signature(done.stdout, fingerprint(content, done.stdout))


def fingerprint(content: bytes, signature: bytes) -> str:
    """The fingerprint of the key that signed ``content``, whoever holds it.

    Raises:
        EvidenceError: it is no signature of this content in this namespace.
    """
    with tempfile.NamedTemporaryFile(prefix="b2g-", suffix=".sig") as file:
        file.write(signature)
        file.flush()
        return _good(_run(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", file.name], content))


def verify(content: bytes, signature: bytes, allowed_signers: Path) -> tuple[str, str]:
    """Principal and fingerprint of the allowed signer who signed ``content``.

    Args:
        allowed_signers: lines of principal, options and public key, as in ssh-keygen(1), ALLOWED SIGNERS.

    Raises:
        EvidenceError: it is no signature of this content, or none by a key that may sign predictions.
        UsageError: the file of allowed signers cannot be read.
        SetupError: there is no ssh-keygen.
    """
    check_readable(allowed_signers, "--allowed-signers")
    signer = fingerprint(content, signature)
    with tempfile.NamedTemporaryFile(prefix="b2g-", suffix=".sig") as file:
        file.write(signature)
        file.flush()
        listed = ["-f", str(allowed_signers), "-s", file.name]
        found = _run(["-Y", "find-principals", *listed], b"").stdout.decode(errors="replace").splitlines()
        # A line may name several principals, separated by commas; any of them will do.
        for principal in [name for line in found for name in (line, *line.split(","))]:
            done = _run(["-Y", "verify", *listed, "-I", principal, "-n", NAMESPACE], content)
            if done.returncode == 0:
                return principal, _good(done)
    raise EvidenceError(
        "signed by a key that may not sign predictions",
        observed=signer,
        allowed=f"the keys for {NAMESPACE} in {allowed_signers.name}",
        hint="compare the key with the one that its owner publishes",
    )


def check_readable(path: Path, where: str) -> None:
    """Raises ``UsageError`` where there is no such file to read."""
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        raise UsageError("cannot read the file", observed=str(path), where=where, hint=_reason(error)) from error


def check_program() -> None:
    """Raises ``SetupError`` where there is no ssh-keygen."""
    _run(["-Y", "check-novalidate"], b"")


def _run(arguments: Sequence[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([PROGRAM, *arguments], input=content, capture_output=True, check=False)
    except OSError as error:
        raise SetupError(
            "signatures need ssh-keygen",
            observed=_reason(error),
            where=PROGRAM,
            hint="install OpenSSH's client, on Debian and Ubuntu: apt install openssh-client",
        ) from error


def _good(done: subprocess.CompletedProcess[bytes]) -> str:
    seen = _FINGERPRINT.search(done.stdout.decode(errors="replace"))
    if done.returncode != 0 or seen is None:
        raise EvidenceError("the signature is not of this content", observed=_last_line(done))
    return seen.group(1)


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str | None:
    said = (done.stderr or done.stdout).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), None)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
