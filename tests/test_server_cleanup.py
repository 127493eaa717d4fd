"""What is left of an embedded server when it, its guard or its parent ends: nothing, wherever it could be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from b2gmodel.errors import ServerError
from b2gmodel.live import server_guard
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.workloads import WorkloadTable, load_workloads

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("pytriton") is None, reason="the wheel nvidia-pytriton is not installed"),
]

TABLE = """
[odd]
input_shape = [13]
datatype = "UINT8"
output_shape = [2, 2]
s0_ms = 0.0
s1_ms = 0.5
max_batch = 4
instances = 1
"""
PATIENCE_S = 20.0


@pytest.fixture
def table(tmp_path: Path) -> WorkloadTable:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    return load_workloads(path)


def processes_of(instance_id: str) -> list[int]:
    """Live processes whose command line names the server. A zombie has no command line: it holds nothing."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if instance_id.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def remains(facts: Mapping[str, Any], *, of_processes_only: bool = False) -> list[str]:
    left = [f"process {pid}" for pid in processes_of(facts["instance_id"])]
    with contextlib.suppress(OSError):
        if Path(f"/proc/{facts['guard']}/cmdline").read_bytes():
            left.append("guard")
    for port in facts["ports"]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                left.append(f"port {port}")
    if not of_processes_only:
        left += [path.name for path in server_guard.SHARED_MEMORY.glob(f"{facts['instance_id']}*")]
        left += [facts["folder"]] if Path(facts["folder"]).exists() else []
    return left


def wait_until_gone(facts: Mapping[str, Any], *, of_processes_only: bool = False) -> list[str]:
    """What is still there when patience ends: empty as soon as all is gone."""
    deadline_s = time.monotonic() + PATIENCE_S
    while left := remains(facts, of_processes_only=of_processes_only):
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)
    return []


def facts_of(server: EmbeddedServer) -> dict[str, Any]:
    status = Path(f"/proc/{server.pid}/status").read_text()
    addresses = (server.http_address, server.grpc_address, server.metrics_address)
    return {
        "instance_id": server.instance_id,
        "folder": str(server.folder),
        "server": server.pid,
        "guard": int(status.partition("PPid:")[2].split()[0]),
        "ports": [port for _, port in addresses],
    }


PARENT = """
import json, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_server_cleanup import facts_of
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.workloads import load_workloads

with EmbeddedServer.start(load_workloads(Path(sys.argv[1])), ["odd"]) as server:
    print(json.dumps(facts_of(server)), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_is_ended(tmp_path: Path, signum: signal.Signals) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    command = [sys.executable, "-c", PARENT, str(path), str(Path(__file__).parent)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True) as parent:
        assert parent.stdout is not None
        facts = json.loads(parent.stdout.readline())
        seen = remains(facts)
        os.killpg(parent.pid, signum)
        parent.wait(PATIENCE_S)
    assert parent.returncode != 0
    assert {"guard", facts["folder"], *(f"port {port}" for port in facts["ports"])} < set(seen)
    assert any(name.startswith(facts["instance_id"]) for name in seen)
    assert wait_until_gone(facts) == []


def test_nothing_is_left_when_the_parent_is_killed_while_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from b2gmodel.live import server
        from b2gmodel.live.workloads import load_workloads

        def killed(guard, timeout_s):
            print(guard.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        server._next_event = killed
        server.EmbeddedServer.start(load_workloads(Path(sys.argv[1])))
        """
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL
    guard = int(done.stdout)
    deadline_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{guard}").exists() and time.monotonic() < deadline_s:
        if Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    assert list(tmp_path.glob(f"{server_guard.PREFIX}*")) == []
    assert processes_of(str(tmp_path)) == []


def test_a_killed_guard_takes_the_server_along_and_the_next_start_sweeps(
    table: WorkloadTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with EmbeddedServer.start(table, ["odd"]) as first:
        facts = facts_of(first)
        os.kill(facts["guard"], signal.SIGKILL)
        assert wait_until_gone(facts, of_processes_only=True) == []
        with pytest.raises(ServerError, match="ended by itself: saw 'its guard ended'"):
            first.check()
    assert facts["folder"] in remains(facts)
    with EmbeddedServer.start(table, ["odd"]) as second:
        assert remains(facts) == []
        assert second.folder.exists()
        second.check()


def test_a_server_in_use_is_not_swept(table: WorkloadTable) -> None:
    with EmbeddedServer.start(table) as server:
        before = remains(facts_of(server))
        assert server.instance_id not in server_guard.sweep(server.folder.parent)
        assert remains(facts_of(server)) == before


def test_a_server_that_dies_is_told_and_cleaned_up(table: WorkloadTable) -> None:
    with EmbeddedServer.start(table, ["odd"]) as server:
        facts = facts_of(server)
        server.check()
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until_gone(facts) == []
        for _ in range(2):
            with pytest.raises(ServerError, match="the embedded server ended by itself: saw 'exit code -9"):
                server.check()
