"""The process that owns the embedded server, and outlives nothing: ``python server_guard.py``.

It learns what to start from one line of JSON on stdin, and takes the end of stdin, which is also what it sees
when its parent is killed, as the order to stop. On stdout it says one JSON object a line: ``ready``,
``failed`` or ``exited``. Whatever ends it, it leaves no process, folder or shared memory; where it is itself
killed, the kernel kills the server with it, and the next start sweeps the folder and the shared memory.

It starts before every server, so it imports little and nothing of this package.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "b2g-server-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
POLL_S = 0.02
WATCH_S = 0.2
# The server has nothing to save; asked to end, it would spend one to two seconds unloading models.
GRACE_S = 0.1
PORT_ATTEMPTS = 5
TAIL_LINES = 12
INFORMATION = re.compile(r"I\d{4} ")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class StopError(Exception):
    """The parent closed our stdin, or is gone."""


class StartError(Exception):
    """The server ended or stayed silent before it was ready."""


def main() -> int:
    """Runs one server until stdin ends. Exit code 0 where it was ready and stopped on order, else 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes our stdin.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _order_stop)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # The server's orphans are ours to reap.
    try:
        order = json.loads(sys.stdin.buffer.readline())
        base = Path(order["base_folder"])
        sweep(base)
        with Folder(base) as folder:
            return _serve(order, folder)
    except StopError:
        return 0
    except Exception as error:
        _say(event="failed", reason=f"{type(error).__name__}: {error}", lines=[])
        return 1


def _order_stop(signum: int, frame: FrameType | None) -> None:
    raise StopError


def _serve(order: dict[str, Any], folder: Folder) -> int:
    lay_out(folder.path, order["files"], order["links"])
    server = Server(order, folder.path)
    try:
        ports = server.start_on_free_ports(time.monotonic() + order["timeout_s"])
        _say(event="ready", instance_id=folder.path.name, folder=str(folder.path), pid=server.pid, **ports)
        server.wait_for_the_end()
    except StartError as failure:
        _say(event="failed", reason=str(failure), lines=server.last_lines())
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.stop()
    _say(event="exited", reason=f"exit code {server.returncode}", lines=server.last_lines())
    return 1


class Folder:
    """A fresh folder, locked as long as this process lives, so that others can tell it from a leftover.

    Shared memory whose name starts with the folder's name belongs to it and goes with it.
    """

    def __init__(self, base: Path) -> None:
        self._base = base

    def __enter__(self) -> Folder:
        while True:
            self.path = self._base / f"{PREFIX}{os.urandom(6).hex()}"
            self.path.mkdir(mode=0o700)
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # Another start swept it between our two calls.
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return self
            os.close(self._lock)

    def __exit__(self, *_: object) -> None:
        remove(self.path)
        os.close(self._lock)


def sweep(base: Path) -> list[str]:
    """Removes what killed guards left in ``base``, and its shared memory; returns those folders' names."""
    swept = []
    for path in base.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # Gone meanwhile, or another user's.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
            swept.append(path.name)
        except OSError:  # In use.
            pass
        finally:
            os.close(lock)
    return swept


def remove(folder: Path) -> None:
    """Removes a server's folder and the shared memory named after it."""
    for region in SHARED_MEMORY.glob(f"{folder.name}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def lay_out(folder: Path, files: dict[str, str], links: dict[str, str]) -> None:
    """Writes texts and symbolic links, both by path within ``folder``."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)


def free_ports() -> dict[str, int]:
    """Three distinct loopback ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(3)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        names = ("http_port", "grpc_port", "metrics_port")
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}
    finally:
        for each in sockets:
            each.close()


class Server:
    """The server process: started on free ports, watched, stopped with all its children."""

    def __init__(self, order: dict[str, Any], folder: Path) -> None:
        self._order = order
        self._folder = folder
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getppid()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def start_on_free_ports(self, deadline_s: float) -> dict[str, int]:
        """Returns the ports once the server is ready; tries others where one was taken meanwhile.

        Args:
            deadline_s: latest moment, on the monotonic clock.

        Raises:
            StartError, StopError.
        """
        for _ in range(PORT_ATTEMPTS):
            ports = self._order.get("ports") or free_ports()
            self._launch(ports)
            while not self._is_ready(ports["http_port"]):
                if self._process is None or self._process.poll() is not None:
                    break
                if time.monotonic() >= deadline_s:
                    raise StartError(f"not ready after {self._order['timeout_s']:g} s")
                self._heed_parent(POLL_S)
            else:
                return ports
            if not self._lost_a_port():
                raise StartError(f"ended with exit code {self.returncode} before it was ready")
            self.stop()
        raise StartError(f"lost its ports to other programs {PORT_ATTEMPTS} times")

    def wait_for_the_end(self) -> None:
        """Returns when the server ended by itself; raises StopError when the parent wants it ended."""
        while self._process is not None and self._process.poll() is None:
            self._heed_parent(WATCH_S)

    def stop(self) -> None:
        """Ends the server and its children: asked first, then killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def last_lines(self) -> list[str]:
        """The last lines in which the server complained; where it did not, its last lines less its tables."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return []
        lines = [line.strip() for line in lines if line.strip() and line[0] not in "+|"]
        complaints = [line for line in lines if not INFORMATION.match(line)]
        return (complaints or lines)[-TAIL_LINES:]

    def _launch(self, ports: dict[str, int]) -> None:
        values = {"folder": str(self._folder), "id": self._folder.name, **ports}
        command = [argument.format_map(values) for argument in self._order["command"]]
        libc = ctypes.CDLL(None)
        guard = os.getpid()

        def die_with_guard() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)

        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._order["environment"],
                preexec_fn=die_with_guard,  # noqa: PLW1509 - this process has one thread
                process_group=0,
            )

    def _is_ready(self, port: int) -> bool:
        """Whether *our* server is ready: another program's may answer on a port that we lost."""
        connection = HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/v2/health/ready")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                return False
            connection.request("GET", "/v2")
            return bool(json.loads(connection.getresponse().read())["name"] == self._folder.name)
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return False
        finally:
            connection.close()

    def _lost_a_port(self) -> bool:
        text = "\n".join(self.last_lines()).lower()
        return "already in use" in text or "failed to add port" in text or "failed to bind" in text

    def _heed_parent(self, wait_s: float) -> None:
        readable, _, _ = select.select([0], [], [], wait_s)
        # A process that the parent forked may hold our stdin open: so its death is looked for, too.
        if os.getppid() != self._parent or (readable and not os.read(0, 4096)):
            raise StopError


def _say(**event: object) -> None:
    with suppress(OSError):  # Nobody may be listening any more.
        os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
