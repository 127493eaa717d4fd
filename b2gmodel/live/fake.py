"""A scriptable KServe v2 server in a process of its own, for the self-test's known delays and for faults.

It runs in its own process, so that its loop never shares an interpreter lock with the instrument that it
tests, and ends when its parent does: its standard input is the parent's pipe, and end of file there is the
order to stop.

``python -m b2gmodel.live.fake --json-config FILE`` runs one by hand until SIGINT or SIGTERM; with ``-`` the
script is the first line of standard input. The first line printed is JSON with ``address`` and ``control``.
Beside the KServe endpoints both addresses answer ``POST /fake/script`` (the next script) and ``GET
/fake/log?since=N`` (the stamps of the inference requests after number N, the last 20,000 at most);
``control`` still accepts where the script's ``accept`` is false.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from b2gmodel.errors import B2GError, ServerError, SetupError, UsageError
from b2gmodel.live.fake_script import (
    Delays,
    FakeModel,
    FakeScript,
    FakeTensor,
    Fault,
    FaultKind,
    LogEntry,
)

__all__ = ["Delays", "FakeModel", "FakeScript", "FakeServer", "FakeTensor", "Fault", "FaultKind", "LogEntry"]

_STOP_S: Final = 5.0
_CONTROL_S: Final = 30.0


class FakeServer:
    """A running fake; a context manager that stops it.

    Attributes:
        address: ``127.0.0.1:PORT`` of the KServe endpoints.
        control: the address that answers whatever the script says.
        pid: its process.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], address: str, control: str) -> None:
        self._process = process
        self._errors = errors
        self.address = address
        self.control = control
        self.pid = process.pid

    @classmethod
    def start(cls, script: FakeScript, *, port: int = 0) -> Self:
        """Start a fake on that port, 0 for a free one. Raises ``SetupError`` where it does not listen."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process may write to it
        process = subprocess.Popen(
            [sys.executable, "-m", "b2gmodel.live.fake", "--json-config", "-", "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(script.to_json().encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        line = process.stdout.readline()
        if not line:
            process.communicate()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            errors.close()
            raise SetupError("the fake server did not start", observed=last[0] if last else None)
        places = json.loads(line)
        return cls(process, errors, places["address"], places["control"])

    def install(self, script: FakeScript) -> None:
        """Replace the script: from the next request on, with ordinals from 1. Counters and log go on."""
        self._call("POST", "/fake/script", script.to_json())

    def log(self, since: int = 0) -> tuple[LogEntry, ...]:
        """The inference requests numbered above ``since``, in order of arrival."""
        return tuple(LogEntry.from_dict(entry) for entry in self._call("GET", f"/fake/log?since={since}")["entries"])

    def stop(self) -> None:
        """Stop it and wait until it is gone. Stopping twice is harmless."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _call(self, method: str, path: str, body: str | None = None) -> Any:
        connection = http.client.HTTPConnection(self.control, timeout=_CONTROL_S)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            document = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServerError("the fake server does not answer", observed=str(error), where=self.control) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError("the fake server refused", observed=document["error"], where=path)
        return document


async def _run(script: FakeScript, port: int, *, until_end_of_input: bool) -> None:
    from b2gmodel.live.fake_server import FakeCore

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_end_of_input:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    core = FakeCore(script, port)
    control = asyncio.create_task(core.serve_control())
    address, control_address = ("{}:{}".format(*s.getsockname()) for s in (core.listener, core.control))
    print(json.dumps({"address": address, "control": control_address}), flush=True)
    await stop.wait()
    control.cancel()


def main(arguments: list[str] | None = None) -> int:
    """Run a fake server until its input ends (``-``) or a signal comes (a file)."""
    parser = argparse.ArgumentParser(prog="python -m b2gmodel.live.fake", description="A scriptable KServe v2 server.")
    parser.add_argument("--json-config", required=True, metavar="FILE", help="the script; - for a line of stdin")
    parser.add_argument("--port", type=int, default=0, help="of the KServe endpoints; 0: a free one")
    options = parser.parse_args(arguments)
    source = options.json_config
    try:
        text = sys.stdin.buffer.readline() if source == "-" else Path(source).read_bytes()
        script = FakeScript.from_json(text)
    except OSError as error:
        print(
            UsageError("cannot read the script", observed=error.strerror, where=source).line(),
            file=sys.stderr,
        )
        return UsageError.exit_code
    except B2GError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_run(script, options.port, until_end_of_input=source == "-"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
