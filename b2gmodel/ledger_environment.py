"""The lock of the environment: every distribution that is installed where a record is made, a line each.

Rules here: what is installed is read once a process, and nothing is written. The lock's digest is that of its bytes,
so that ``sha256sum`` of the file which holds it gives the digest that the record states.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from functools import cache


@cache
def environment_lock() -> str:
    """``name==version`` of all that is installed, sorted, a line each; names are normalised as PEP 503 says."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # What was half removed has no name. Of two of one name the first is the one that is imported.
        if distribution.name:
            versions.setdefault(re.sub(r"[-_.]+", "-", distribution.name).lower(), distribution.version)
    return "".join(sorted(f"{name}=={version}\n" for name, version in versions.items()))


def environment_digest() -> str:
    """SHA-256 of the lock, 64 hexadecimal digits."""
    return hashlib.sha256(environment_lock().encode()).hexdigest()


def lock_file(digest: str) -> str:
    """The name of the file, beside the predictions, that holds the lock of this digest."""
    return f"environment-{digest[:12]}.txt"
