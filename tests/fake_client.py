"""A plain client of the fake server, independent of the package's own, and how its tests renew it."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from typing import Any

from b2gmodel.live.fake import (
    FakeModel,
    FakeScript,
    FakeServer,
    FakeTensor,
    LogEntry,
)

ROW = (4, 3)
MODEL = FakeModel("m", inputs=(FakeTensor("x", "FP32", ROW),))
SCRIPT = FakeScript((MODEL,))
TIMEOUT_S = 30
MS = 1_000_000


STAMPS = (
    "header_ns",
    "body_ns",
    "queue_start_ns",
    "compute_start_ns",
    "input_end_ns",
    "infer_end_ns",
    "compute_end_ns",
    "first_byte_ns",
    "last_byte_ns",
)


def stamps_of(entry: LogEntry) -> list[int]:
    return [getattr(entry, name) for name in STAMPS]


def renew(server: FakeServer) -> FakeServer:
    """The process with script and counters as new: a script without the model drops its counters."""
    server.install(FakeScript(()))
    server.install(SCRIPT)
    return server


def get(server: FakeServer, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT_S)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body) if body else None


def payload(rows: int) -> bytes:
    """Row i begins with the integer 1000 + i and is filled with 0xff."""
    rest = b"\xff" * (4 * ROW[0] * ROW[1] - 8)
    return b"".join(struct.pack("<Q", 1000 + i) + rest for i in range(rows))


def message(rows: int = 2, **changes: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an inference request; ``changes`` go into the one input's description."""
    item = {"name": "x", "datatype": "FP32", "shape": [rows, *ROW]}
    item |= {"parameters": {"binary_data_size": len(payload(rows))}} | changes
    document = {"id": "id-7", "inputs": [item], "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    return head + payload(rows), {"Inference-Header-Content-Length": str(len(head))}


def infer(server: FakeServer, rows: int = 2, model: str = "m", **changes: Any) -> tuple[int, Any, bytes]:
    """Status, JSON document and binary rest of the answer to one request on a connection of its own."""
    connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT_S)
    try:
        body, headers = message(rows, **changes)
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    length = int(response.getheader("Inference-Header-Content-Length") or len(answer))
    return response.status, json.loads(answer[:length]), answer[length:]


def stats(server: FakeServer, model: str = "m") -> dict[str, Any]:
    status, document = get(server, f"/v2/models/{model}/stats")
    assert status == 200
    (only,) = document["model_stats"]
    return dict(only)


def raw_request(rows: int = 2) -> bytes:
    body, headers = message(rows)
    lines = [f"{name}: {value}" for name, value in {**headers, "Content-Length": str(len(body))}.items()]
    return "\r\n".join(["POST /v2/models/m/infer HTTP/1.1", "Host: fake", *lines, "", ""]).encode() + body


def connect(server: FakeServer) -> socket.socket:
    host, port = server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def read_answer(sock: socket.socket, extra: int = 0) -> tuple[bytes, bytes]:
    """Head, and as many body bytes as its Content-Length says plus ``extra``."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    while len(body) < promised(head) + extra:
        body += sock.recv(65536)
    return head, body


def promised(head: bytes) -> int:
    (line,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(line.split(b":")[1])
