"""``b2g serve`` as a process: before the fake server, and before a real Triton."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from b2gmodel.live.arrays import Array
from b2gmodel.live.client import Busy, Client, Refused, UpstreamFailed
from b2gmodel.live.fake import FakeModel, FakeScript, FakeServer, FakeTensor, Fault, FaultKind
from b2gmodel.live.repository import OUTPUT_NAME
from b2gmodel.live.workloads import fingerprint

if TYPE_CHECKING:
    from b2gmodel.live.server import EmbeddedServer

MODEL = FakeModel("m", inputs=(FakeTensor("x", "FP32", (4, 3)),))
PATIENCE_S = 30


class Served:
    """A running ``b2g serve``."""

    def __init__(self, process: subprocess.Popen[str], first: str) -> None:
        self.process, self.first = process, first
        self.place = json.loads(first)["listening"] if first.startswith("{") else first.removeprefix("listening: ")
        host, port = self.place.strip().rsplit(":", 1)
        self.host, self.port = str(host), int(port)

    def client(self) -> Client:
        return Client(self.host, self.port, timeout_s=PATIENCE_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Its exit code and the rest of what it said."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Not communicate(): it reads past what readline() has already buffered.
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)
        watchdog.start()
        out, err = self.process.stdout.read(), self.process.stderr.read()
        self.process.wait()
        watchdog.cancel()
        return self.process.returncode, out, err


@contextmanager
def served(address: str, model: str, *options: str) -> Iterator[Served]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from b2gmodel.cli import main; main()",
            "serve",
            "--url",
            address,
            "--model",
            model,
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Served(process, process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def refused(*options: str) -> tuple[int, str]:
    """Exit code and last word of a ``b2g serve`` that does not start."""
    done = subprocess.run(
        [sys.executable, "-c", "from b2gmodel.cli import main; main()", "serve", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.strip()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer.start(FakeScript((MODEL,))) as server:
        yield server


def row(mark: int) -> Array:
    values = np.zeros((4, 3), "<f4")
    values.view("<u4")[0, 0] = mark
    return values


def test_what_it_says_from_start_to_end(fake: FakeServer) -> None:
    fake.install(FakeScript((MODEL,)))
    with served(fake.address, "m", "-k", "2", "-M", "2", "--queue", "16", "--formation-deadline", "0ms") as it:
        with it.client() as client:
            assert client.infer("m", {"x": row(7)})["fake_output"].tolist() == [7]
            with pytest.raises(Refused, match="this proxy serves 'm', not 'n'"):
                client.infer("n", {"x": row(7)})
            with pytest.raises(Refused, match=r"input x is FP32 \[3\], must be FP32 \[4, 3\]"):
                client.infer("m", {"x": np.zeros(3, "<f4")})
            fake.install(FakeScript((MODEL,), (Fault(FaultKind.STATUS, at=(1,), status=503),)))
            with pytest.raises(UpstreamFailed, match="HTTP 503"):
                client.infer("m", {"x": row(8)})
            assert client.infer("m", {"x": row(9)})["fake_output"].tolist() == [9]
        code, rest, errors = it.stop()
        assert (code, errors) == (0, "")
        assert it.first == f"listening: 127.0.0.1:{it.port}\n"
        assert rest == (
            "  model    m, 0.046875 KiB a request, http\n"
            "  policy   k = 2, M = 2, queue 16; a partial batch goes after 0 ms\n"
            "  memory   at most 273 MiB beside the program: payloads 0 (taken now), frames 145, "
            "answers not yet read 128\n"
            "served: 5 requests = 2 answered + 1 upstream + 2 refused; 3 flights, 1 failed; 0 protocol errors, "
            "0 slow readers cut off\n"
        )


def test_json_and_counts_that_balance_under_load(fake: FakeServer) -> None:
    fake.install(FakeScript((MODEL,)))
    with served(fake.address, "m", "-k", "4", "-M", "3", "--queue", "4", "--json") as it:

        def work(client_number: int) -> int:
            busy = 0
            with it.client() as client:
                for request in range(20):
                    mark = client_number * 1000 + request
                    try:
                        assert client.infer("m", {"x": row(mark)})["fake_output"].tolist() == [mark]
                    except Busy:
                        busy += 1
            return busy

        with ThreadPoolExecutor(24) as pool:
            busy = sum(pool.map(work, range(24)))
        code, rest, _ = it.stop(signal.SIGINT)
        ended = json.loads(rest)
        assert code == 0
        assert ended["finished"]
        assert ended["received"] == 24 * 20 == sum(ended["outcomes"].values())
        assert ended["outcomes"]["busy"] == busy
        assert ended["outcomes"]["answered"] == 24 * 20 - busy
        assert ended["open"] == 0


def test_what_it_does_not_start_with(fake: FakeServer) -> None:
    base = ("--url", fake.address, "--model", "m")
    code, words = refused(*base, "--listen", "0.0.0.0:0")
    assert (code, "can be reached from outside" in words, "--allow-public" in words) == (2, True, True)
    assert refused(*base, "--listen", "here")[0] == 2
    assert refused(*base, "--placement", "C9")[0] == 2
    assert refused(*base, "-k", "9") == (
        2,
        "b2g: m: the model does not take batches of this size: saw 9; allowed: 1 to 8",
    )
    assert refused("--url", fake.address, "--model", "zz")[0] == 2


@pytest.mark.real
@pytest.mark.parametrize("transport", ["http", "grpc", "shm"])
def test_each_request_gets_its_own_result_from_a_real_server(triton: EmbeddedServer, transport: str) -> None:
    http, grpc = ("{}:{}".format(*address) for address in (triton.http_address, triton.grpc_address))
    with served(http, "resnet50", "-k", "4", "-M", "2", "--transport", transport, "--grpc-url", grpc, "--json") as it:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            with it.client() as client:
                for _ in range(3):
                    image = rng.random((3, 224, 224), np.float32)
                    output = client.infer("resnet50", {"input": image})[OUTPUT_NAME]
                    assert output.shape == (1000,)
                    assert output.tobytes()[:16] == fingerprint(image.data)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        code, rest, _ = it.stop()
        ended = json.loads(rest)
        assert (code, ended["outcomes"]["answered"], ended["flights_failed"]) == (0, 24, 0)
