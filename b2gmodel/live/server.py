"""The embedded server: the real Triton of the wheel, with the reference workloads, on free loopback ports.

This module finds the wheel's parts, says what is to be started, and talks to the guard (``server_guard.py``)
that owns the server process. Nothing of the server outlives the caller, however the caller ends. No clock is
read that enters a record.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from b2gmodel.errors import ServerError, SetupError
from b2gmodel.live.engines import Engine
from b2gmodel.live.model_cache import model_file
from b2gmodel.live.repository import embedded_repository, model_links, offered
from b2gmodel.live.workloads import WorkloadTable

HOST: Final = "127.0.0.1"
# The allocator keeps what it has instead of giving it back to the kernel after a large batch: fresh pages cost more
# than copies, and whether they were needed changed from start to start, and with it S and D by a third (ADR 9).
_MEMORY_KEPT: Final = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
INSTALL_HINT: Final = "pip install 'b2gmodel[triton]'"
STUB: Final = "triton_python_backend_stub"

_Guard: TypeAlias = subprocess.Popen[bytes]
_GUARD_PROGRAM: Final = Path(__file__).with_name("server_guard.py")
_GUARD_MARGIN_S: Final = 10.0
_LOADING_S: Final = 120.0
"""For real models: importing an engine and making a GPU ready, twice for each workload."""
_COMMAND: Final = (
    "--id={id}",
    "--model-repository={folder}/models",
    "--backend-directory={folder}/backends",
    "--backend-config=python,shm-region-prefix-name={id}-",
    "--disable-auto-complete-config",  # or each model's stub would be started twice
    "--http-address=127.0.0.1",
    "--http-port={http_port}",
    "--grpc-address=127.0.0.1",
    "--grpc-port={grpc_port}",
    "--metrics-address=127.0.0.1",
    "--metrics-port={metrics_port}",
    "--allow-gpu-metrics=false",
    "--allow-cpu-metrics=false",
    "--trace-config=triton,file={folder}/trace",  # the trace extension may not set the file
    "--trace-config=level=OFF",
    "--exit-timeout-secs=1",
)


@dataclass(frozen=True, slots=True)
class Installation:
    """The parts of the server's wheel that a start needs.

    Attributes:
        binary: the server.
        backend: folder of the Python backend, without its stub.
        stub: the backend's executable for this Python version.
        import_path: the folder that holds numpy.
    """

    binary: Path
    backend: Path
    stub: Path
    import_path: Path


def python_version() -> str:
    """This Python's version as the wheel names its stubs, such as ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_installation() -> Installation:
    """The installed wheel's parts. Raises ``SetupError`` where one is missing."""
    wheel, numpy = find_spec("pytriton"), find_spec("numpy")
    if wheel is None or not wheel.submodule_search_locations:
        raise SetupError("the embedded server is not installed", observed="no nvidia-pytriton", hint=INSTALL_HINT)
    if numpy is None or not numpy.submodule_search_locations:
        raise SetupError("the embedded server needs numpy", observed="no numpy", hint=INSTALL_HINT)
    root = Path(wheel.submodule_search_locations[0]) / "tritonserver"
    stubs = root / "python_backend_stubs"
    parts = Installation(
        binary=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=stubs / python_version() / STUB,
        import_path=Path(numpy.submodule_search_locations[0]).parent,
    )
    if not parts.stub.is_file():
        with_stub = sorted((path.name for path in stubs.glob("3.*")), key=lambda name: int(name.split(".")[1]))
        raise SetupError(
            "the embedded server has no part for this Python",
            observed=python_version(),
            allowed=", ".join(with_stub) or None,
            hint=INSTALL_HINT + " under one of those" if with_stub else INSTALL_HINT,
        )
    for part in (parts.binary, parts.backend / "libtriton_python.so"):
        if not part.is_file():
            raise SetupError("the embedded server's wheel is not whole", observed=f"no {part}", hint=INSTALL_HINT)
    return parts


def shared_python_folder() -> Path | None:
    """The folder with this interpreter's own libpython, which the stub loads.

    None where the interpreter has none beside it: then the system's library of the same version has to do.
    """
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    return folder if (folder / f"libpython{python_version()}.so.1.0").is_file() else None


class EmbeddedServer:
    """A running server. Use it in a ``with`` statement, or call ``close``.

    Attributes:
        instance_id: unique name of this start; the server's own name and the prefix of its shared memory.
        http_address, grpc_address, metrics_address: (host, port).
        version: the server's own version.
        engine: what the workloads compute with; None for emulation.
        table_digest: digest of the table of workloads.
        models: the workloads offered.
        folder: the server's temporary folder, gone after ``close``.
        trace_file: where the trace extension writes, once it is switched on.
        pid: the server's process.
    """

    def __init__(
        self,
        guard: _Guard,
        ready: Mapping[str, Any],
        table: WorkloadTable,
        models: Sequence[str],
        engine: Engine | None = None,
    ) -> None:
        self._guard = guard
        self._end: str | None = None
        self.engine = engine
        self.table_digest = table.digest
        self.models = tuple(models)
        self.instance_id: str = ready["instance_id"]
        self.http_address = (HOST, int(ready["http_port"]))
        self.grpc_address = (HOST, int(ready["grpc_port"]))
        self.metrics_address = (HOST, int(ready["metrics_port"]))
        self.folder = Path(ready["folder"])
        self.trace_file = self.folder / "trace"
        self.pid = int(ready["pid"])
        self.version = _server_version(self.http_address)

    @property
    def compute(self) -> str:
        """How the workloads compute: ``emulated`` or ``real``."""
        return "emulated" if self.engine is None else "real"

    @classmethod
    def start(
        cls,
        table: WorkloadTable,
        models: Sequence[str] | None = None,
        timeout_s: float = 60.0,
        engine: Engine | None = None,
    ) -> EmbeddedServer:
        """Starts a server and returns when it is ready.

        Args:
            table: the workloads.
            models: names of those to offer, each in its three entries; None for all. Fewer start sooner.
            timeout_s: longest wait for readiness, to which real models add their own.
            engine: what computes; None for emulation.

        Raises:
            UsageError: a name that the table does not hold, or one that has no real model.
            SetupError: the wheel or its part for this Python is missing, or the server did not start.
        """
        if engine is not None:
            timeout_s += _LOADING_S
        order = _start_order(find_installation(), table, models, timeout_s, engine)
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        try:
            assert guard.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # It ended early: what it said, or did not, tells why.
                guard.stdin.write(json.dumps(order).encode() + b"\n")
                guard.stdin.flush()
            event = _next_event(guard, timeout_s + _GUARD_MARGIN_S)
            if event.get("event") != "ready":
                raise _start_failure(event)
            return cls(guard, event, table, models or table.names, engine)
        except BaseException:
            _end(guard)
            raise

    def check(self) -> None:
        """Raises ``ServerError`` with the server's last lines if it ended by itself."""
        if self._end is None and self._guard.stdout is not None and not self._guard.stdout.closed:
            readable, _, _ = select.select([self._guard.stdout], [], [], 0)
            if readable:
                event = _next_event(self._guard, 1.0)
                self._end = " / ".join([event["reason"], *event["lines"]])
        if self._end is not None:
            raise ServerError("the embedded server ended by itself", observed=self._end)

    def close(self) -> None:
        """Stops the server and waits until nothing of it is left. A second call does nothing."""
        _end(self._guard)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_order(
    parts: Installation, table: WorkloadTable, models: Sequence[str] | None, timeout_s: float, engine: Engine | None
) -> Mapping[str, object]:
    """What the guard is told: the files to lay out, the command with places for ports, the environment."""
    files = {} if engine is None else {each.name: model_file(each) for each in offered(table, models)}
    engine_paths = () if engine is None else _package_folders()
    repository = embedded_repository(table, models, parts.import_path, engine, files, engine_paths)
    backend = "backends/python"
    return {
        "base_folder": tempfile.gettempdir(),
        "timeout_s": timeout_s,
        "files": {f"models/{path}": text for path, text in repository.items()},
        "links": {
            **{f"{backend}/{path.name}": str(path) for path in parts.backend.iterdir() if path.is_file()},
            f"{backend}/{STUB}": str(parts.stub),
            **{f"models/{path}": target for path, target in model_links(files, table).items()},
        },
        "command": [str(parts.binary), *_COMMAND],
        "environment": _environment(on_gpu=engine is not None and engine.on_gpu),
    }


def _package_folders() -> tuple[Path, ...]:
    """Where this interpreter finds its packages, in its order."""
    return tuple(Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))


def _start_failure(event: Mapping[str, Any]) -> SetupError:
    """The error that shows the server's own last lines, folded into one."""
    said = " / ".join(event["lines"])
    hint = "b2g doctor tells what this machine lacks"
    if "libpython" in said:
        library = f"libpython{python_version()}"
        hint = f"install this Python's shared library, for example: apt install {library}"
    return SetupError(f"the embedded server did not start ({event['reason']})", observed=said or None, hint=hint)


def _environment(*, on_gpu: bool = False) -> dict[str, str]:
    """Our own environment: no GPU but for a model on one, one thread for linear algebra, memory kept, our libpython."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment |= _MEMORY_KEPT
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    folder = shared_python_folder()
    if folder is not None:
        paths = (str(folder), environment.get("LD_LIBRARY_PATH"))
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        environment["PYTHONHOME"] = sys.base_prefix
    return environment


def _next_event(guard: _Guard, timeout_s: float) -> dict[str, Any]:
    """The guard's next line; a failure in the same form where it ended or stayed silent."""
    assert guard.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([guard.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        part = os.read(guard.stdout.fileno(), 65536) if readable else b""
        if not part:
            reason = "its guard ended" if readable else f"its guard said nothing within {timeout_s:g} s"
            return {"event": "failed", "reason": reason, "lines": []}
        line += part
    event: dict[str, Any] = json.loads(line.splitlines()[0])
    return event


def _end(guard: _Guard) -> None:
    """Closes the guard's stdin, which ends the server, and waits; kills both where that does not help."""
    if guard.stdin is not None and not guard.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
    try:
        guard.wait(_GUARD_MARGIN_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
    if guard.stdout is not None:
        guard.stdout.close()


def _server_version(address: tuple[str, int]) -> str:
    connection = HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", "/v2")
        return str(json.loads(connection.getresponse().read())["version"])
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise ServerError(f"the embedded server did not tell its version ({error})") from error
    finally:
        connection.close()
