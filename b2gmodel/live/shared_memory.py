"""Memory that this process and an inference server both map, and the promise that none of it is left behind.

Rules:

* A region has no name in the file system but for the moment in which the server maps it, so whatever ends this
  process, the kernel takes its pages back once the server lets go.
* A server that was restarted knows no region: after a failure it is asked, and told anew. A file that has had its
  name once gets no other, so a fresh one is put under the same memory, with the same contents.
* Each owner holds a lock on an empty marker file, which the kernel drops with the process. The next owner removes
  the names and the registrations of owners whose lock is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from b2gmodel.errors import B2GError, ServerError, SetupError
from b2gmodel.live.http import Buffer
from b2gmodel.live.http_pool import HttpPool

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
_PREFIX: Final = "b2g-proxy-"
_NAME: Final = re.compile(rf"({_PREFIX}[0-9a-f]{{12}})(-[0-9]+)?")
_REGISTRY: Final = "/v2/systemsharedmemory"
_MAP_FIXED: Final = 0x10  # Linux, all architectures that have this server


def address_of(buffer: Buffer) -> int:
    """The address of a buffer's first byte."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class Region:
    """One shared mapping. ``memory`` is all of it; ``name`` is how the server knows it."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self._file: int | None = _nameless_file(nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.memory = memoryview(mmap.mmap(self._file, nbytes, flags=flags))
        self.begin = address_of(self.memory)
        self._tried = False

    def path(self, order: str) -> str:
        """Where the server takes an order about this region."""
        return f"{_REGISTRY}/region/{self.name}/{order}"

    def fill(self, offset: int, part: Buffer) -> int:
        """Copy ``part`` to ``offset``; returns where it ends."""
        source = memoryview(part).cast("B")
        end = offset + source.nbytes
        self.memory[offset:end] = source
        return end

    async def register(self, pool: HttpPool) -> None:
        """Let the server map it. Raises ``ServerError`` where it cannot, ``SetupError`` where there is no room."""
        if self._tried:
            # A registration that broke off may have gone through, and a second one would be refused.
            await pool.request("POST", self.path("unregister"))
            self._renew()
        self._tried = True
        assert self._file is not None
        order = {"key": f"/{self.name}", "offset": 0, "byte_size": self.memory.nbytes}
        with _named(self._file, self.name):
            answer = await pool.request("POST", self.path("register"), body=[json.dumps(order).encode()])
        if answer.status != 200:
            raise ServerError(
                "the server does not take our shared memory",
                observed=f"HTTP {answer.status} {answer.error_text()}",
                where=self.name,
                hint="shm needs proxy and server on one host, with one /dev/shm; elsewhere use --transport http",
            )
        self.discard()

    def _renew(self) -> None:
        """Put a fresh file under the memory, so that it can be named again."""
        nbytes, written = self.memory.nbytes, 0
        file = _nameless_file(nbytes)
        try:
            while written < nbytes:
                written += os.pwrite(file, self.memory[written:], written)
            _map_over(self.begin, file, nbytes)
        except BaseException:
            os.close(file)
            raise
        self.discard()
        self._file = file

    def discard(self) -> None:
        """Let go of the file; mappings stay."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RegionOwner:
    """The regions of one transport. They are made at once, and registered with the server when first needed."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._id = f"{_PREFIX}{secrets.token_hex(6)}"
        self._marker: int | None = None
        self._regions: list[Region] = []
        self._new: list[Region] = []
        self._registering = asyncio.Lock()
        self._doubted = False
        self._swept = False

    def allocate(self, nbytes: int) -> Region:
        """A new region of that size. Raises ``SetupError`` where the machine's shared memory is full."""
        if self._marker is None:
            self._marker = _locked_marker(self._id)
        region = Region(f"{self._id}-{len(self._regions)}", max(1, nbytes))
        self._regions.append(region)
        self._new.insert(0, region)
        return region

    def find(self, begin: int, nbytes: int) -> tuple[str, int] | None:
        """Region and offset of that stretch of memory, if it lies within one region."""
        for region in self._regions:
            if region.begin <= begin and begin + nbytes <= region.begin + region.memory.nbytes:
                return region.name, begin - region.begin
        return None

    def doubt(self) -> None:
        """A batch has failed: the server may be another one by now, which knows no region."""
        self._doubted = True

    async def register(self) -> None:
        """Let the server map what it does not know, or no more. Raises as ``Region.register``."""
        if not self._new and not self._doubted:
            return
        async with self._registering:
            if self._doubted:
                known = await _known(self._pool)
                self._new = [region for region in reversed(self._regions) if region.name not in known]
                self._doubted = False
            while self._new:
                await self._new[-1].register(self._pool)
                self._new.pop()
                if not self._swept:
                    # Only now is it certain that the server's shared memory is ours, too.
                    self._swept = True
                    await _sweep(self._pool)

    async def aclose(self) -> None:
        """Take all regions back; their memory goes with its last user."""
        regions, self._regions, self._new = self._regions, [], []
        try:
            with suppress(ServerError):  # A server that is gone holds nothing of ours.
                for region in regions:
                    await self._pool.request("POST", region.path("unregister"))
        finally:
            for region in regions:
                region.discard()
            if self._marker is not None:
                (_FOLDER / self._id).unlink(missing_ok=True)
                os.close(self._marker)
                self._marker = None


def _nameless_file(nbytes: int) -> int:
    """A file in shared memory that no path leads to, with all its pages."""
    try:
        file = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise _no_memory(error, observed=f"{nbytes} bytes") from error
    return file


def _no_memory(error: OSError, *, observed: str) -> SetupError:
    return SetupError(
        f"cannot take shared memory ({error.strerror or error})",
        observed=observed,
        where=str(_FOLDER),
        hint="free some, or allow more (docker run --shm-size)",
    )


def _map_over(begin: int, file: int, nbytes: int) -> None:
    """Map a file where another is mapped: who holds views of that memory sees the new file's from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    if libc.mmap(begin, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != begin:
        raise OSError(ctypes.get_errno(), "the memory cannot be mapped anew")


@contextmanager
def _named(file: int, name: str) -> Iterator[None]:
    """Give a nameless file a name for a moment. Raises ``SetupError`` where there is no room for one."""
    try:
        _link(file, name)
    except OSError as error:
        raise _no_memory(error, observed=f"no room for the name {name}") from error
    try:
        yield
    finally:
        (_FOLDER / name).unlink(missing_ok=True)


def _link(file: int, name: str) -> None:
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With a folder's descriptor, the call follows the link to the file itself.
        os.link(str(file), _FOLDER / name, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def _locked_marker(name: str) -> int:
    """An empty file of that name, locked before anyone can see it."""
    file = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        _link(file, name)
    except BaseException:
        os.close(file)
        raise
    return file


async def _known(pool: HttpPool) -> set[str]:
    """The regions that the server has mapped, anybody's. Raises ``ServerError`` where it does not say."""
    answer = await pool.request("GET", f"{_REGISTRY}/status")
    try:
        return {str(entry["name"]) for entry in answer.json()}
    except (KeyError, TypeError) as error:
        raise ServerError(
            "the server does not say which shared memory it knows",
            observed=f"HTTP {answer.status} {answer.error_text()}",
            where=_REGISTRY,
        ) from error


async def _sweep(pool: HttpPool) -> None:
    """Remove what killed owners left: their names here, their regions in the server."""
    left = {path.name for path in _FOLDER.glob(f"{_PREFIX}*")}
    with suppress(B2GError):
        left |= await _known(pool)
    ours = [match for match in map(_NAME.fullmatch, left) if match]
    for owner in {match[1] for match in ours}:
        with _dead(owner) as dead:
            if not dead:
                continue
            for match in ours:
                if match[1] == owner and match[2]:
                    await pool.request("POST", f"{_REGISTRY}/region/{match[0]}/unregister")
                    (_FOLDER / match[0]).unlink(missing_ok=True)
            (_FOLDER / owner).unlink(missing_ok=True)


@contextmanager
def _dead(owner: str) -> Iterator[bool]:
    """Whether an owner is gone; if so, nobody else clears up after it meanwhile."""
    try:
        file = os.open(_FOLDER / owner, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    except PermissionError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)
