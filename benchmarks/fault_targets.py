"""What fault benchmarks and ``tests/faults`` hurt: a fake server, a real one and ``b2g serve``, each a process.

Rules: a server comes back on its own port, as one does that was restarted; nothing outlives its block.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

from fault_parts import ROW

from b2gmodel.live import server as server_module
from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.workloads import load_workloads

TRITON_TABLE: Final = """
[m]
input_shape = [16]
datatype = "UINT8"
output_shape = [4]
s0_ms = {s0_ms}
s1_ms = 0.01
max_batch = 64
instances = 1
"""


def fake_model(infer_ns: int = 2_000_000, instances: int = 4) -> FakeModel:
    """The fake's model for the callers: a result is the first eight bytes of its request."""
    inputs, delays = (FakeTensor("input", "UINT8", (ROW.size,)),), Delays(compute_infer_base_ns=infer_ns)
    return FakeModel("m", inputs, max_batch=64, instances=instances, delays=delays)


def free_port() -> int:
    """A free loopback port that no outgoing connection takes, so that a server can come back to it."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Fake:
    """The scriptable server on one port, killed, paused and started again at will."""

    def __init__(self, script: FakeScript) -> None:
        self.script, self.port = script, free_port()
        self.server = FakeServer.start(script, port=self.port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def install(self, script: FakeScript) -> None:
        """Follow another script, after a restart, too."""
        self.script = script
        self.server.install(script)

    def pause(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and gone."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def start(self) -> None:
        """Again, on the same port, after ``kill``."""
        self.server = FakeServer.start(self.script, port=self.port)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.resume()
        self.server.stop()


class Served:
    """A running ``b2g serve`` before the model ``m``, and what it said first."""

    def __init__(self, address: str, *options: str, prelude: str = "", port: int = 0, within: tuple[str, ...] = ()):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process may write to it
        command = [sys.executable, "-c", f"{prelude}\nfrom b2gmodel.cli import main; main()", "serve"]
        place = ("--url", address, "--model", "m", "--json", "--listen", f"127.0.0.1:{port}")
        self.process = subprocess.Popen(
            [*within, *command, *place, *options], stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        assert self.process.stdout is not None
        self.first: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        host, _, number = self.first.get("listening", ":0").rpartition(":")
        self.place = (str(host), int(number))
        self.pid = self.process.pid

    def end(self, patience_s: float = 60.0) -> dict[str, Any]:
        """Stopped in good order: its last counts and its exit code."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.wait(patience_s)

    def wait(self, patience_s: float = 60.0) -> dict[str, Any]:
        """Wait for its end: its last counts, if it told any, and its exit code."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(patience_s, self.process.kill)
        watchdog.start()
        words = self.process.stdout.read()  # not communicate(): it reads past what readline() has buffered
        self.process.wait()
        watchdog.cancel()
        return {**(json.loads(words) if words.strip() else {}), "exit": self.process.returncode}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def complaints(self) -> str:
        """What it said on stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


class Triton:
    """A real server with the model ``m`` on a port of its own, killed, paused and started again at will.

    Args:
        s0_ms: what its one instance takes for a batch; little, and this machine bounds the rate.
    """

    def __init__(self, s0_ms: float = 0.5) -> None:
        self._table = TRITON_TABLE.format(s0_ms=s0_ms)
        self.port = free_port()
        self._running = ExitStack()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def options(self) -> tuple[str, ...]:
        """What ``b2g serve`` has to be told beside the address."""
        return ("--grpc-url", f"127.0.0.1:{self.port + 1}")

    def pause(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and gone."""
        os.kill(self._pid, signal.SIGKILL)
        self._running.close()

    def start(self) -> None:
        """Again, on the same ports, after ``kill``."""
        with tempfile.TemporaryDirectory(prefix="b2g-table-") as folder:
            path = Path(folder, "table.toml")
            path.write_text(self._table, encoding="utf-8")
            table = load_workloads(path)
        order = server_module._start_order

        def on_our_ports(*arguments: Any, **options: Any) -> Mapping[str, object]:
            names = ("http_port", "grpc_port", "metrics_port")
            return {**order(*arguments, **options), "ports": {name: self.port + n for n, name in enumerate(names)}}

        with mock.patch.object(server_module, "_start_order", on_our_ports):
            server = self._running.enter_context(server_module.EmbeddedServer.start(table))
        self._pid = server.pid

    def __enter__(self) -> Triton:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
