"""What mutual TLS costs: requests a second through ``b2g serve`` over TLS and over TCP, by turns, before the fake.

    python benchmarks/tls_rate.py [--rounds 4]

No bar is set; it states the ratios, and ends with 1 where a client without a certificate was answered. Client, proxy
and fake share the machine, so encryption is paid for twice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import trustme

from b2gmodel.errors import B2GError
from b2gmodel.live.client import Client
from b2gmodel.live.fake import FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.load import ClosedLoop, LoadSpec, run_load
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.tls import ClientTls

SHAPES = {"4 KiB": (1024,), "588 KiB": (3, 224, 224)}
CLIENTS, SECONDS, WARMUP_S = 16, 3.0, 1.0


@contextmanager
def proxy(url: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """A running ``b2g serve``; its address."""
    command = [sys.executable, "-m", "b2gmodel", "serve", "--url", url, "--model", "m", "-q", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, port = process.stdout.readline().removeprefix("listening: ").strip().rsplit(":", 1)
            yield host, int(port)
        finally:
            process.terminate()


def rate_per_s(url: str, shape: tuple[int, ...], options: list[str], tls: ClientTls | None) -> float:
    """Answered requests a second of closed-loop clients."""
    with proxy(url, options) as (host, port):
        inputs, loop = (TensorSpec("x", "FP32", shape),), ClosedLoop(CLIENTS)
        return run_load(LoadSpec(host, port, "m", inputs, loop, SECONDS, WARMUP_S, tls=tls)).throughput_per_s


def answers_a_stranger(url: str, shape: tuple[int, ...], options: list[str], ca: str) -> bool:
    """Whether a client that trusts the proxy, and shows no certificate, gets a result."""
    with proxy(url, options) as (host, port), Client(host, port, tls=ClientTls(ca), timeout_s=20) as client:
        try:
            client.infer("m", {"x": np.zeros(shape, np.float32)})
        except B2GError:
            return False
    return True


def main() -> int:
    """Prints a row a payload and the verdict as one line of JSON."""
    parser = argparse.ArgumentParser(description="Throughput over TLS against TCP.")
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    ratios, answered = {}, False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        ca, certificate, key = (str(folder / each) for each in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(ca)
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        options = ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", ca]
        tls = ClientTls(ca, certificate, key)
        for size, shape in SHAPES.items():
            with FakeServer.start(FakeScript((FakeModel("m", inputs=(FakeTensor("x", "FP32", shape),)),))) as fake:
                url = f"http://{fake.address}"
                pairs = [
                    (rate_per_s(url, shape, [], None), rate_per_s(url, shape, options, tls)) for _ in range(rounds)
                ]
                answered |= answers_a_stranger(url, shape, options, ca)
            ratios[size] = median(over_tls / over_tcp for over_tcp, over_tls in pairs)
            seen = ", ".join(f"{over_tcp:.0f} and {over_tls:.0f}" for over_tcp, over_tls in pairs)
            print(f"tls_rate: {size}: TCP and TLS, request/s: {seen}; ratio {ratios[size]:.2f}")
    value = min(ratios.values())
    print(json.dumps({"name": "tls_rate", "value": value, "bar": None, "held": not answered, "ratios": ratios}))
    return 1 if answered else 0


if __name__ == "__main__":
    sys.exit(main())
