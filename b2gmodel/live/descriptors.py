"""How many files and connections this process may have open."""

from __future__ import annotations

import resource

from b2gmodel.errors import UsageError


def allow_files(wanted: int, *, where: str) -> None:
    """Raise this process's limit on open files where the system lets us. Raises ``UsageError`` where it does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise UsageError(
            "more connections than this process may have files open",
            observed=f"{wanted} files",
            allowed=f"{hard} (ulimit -Hn)",
            where=where,
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
