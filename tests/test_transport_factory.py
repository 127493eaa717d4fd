"""Transports by name, and the addresses that they need."""

from __future__ import annotations

import numpy as np
import pytest

from b2gmodel.errors import UsageError
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.target import Endpoint, parse_url
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.transport import HttpTransport
from b2gmodel.live.transports import DEFAULT_TRANSPORT, make_transport


class TestFactory:
    MODEL = ModelSpec("m", "1", "", 8, 1, False, (TensorSpec("x", "FP32", (2,)),), (), "real", {})

    def test_http_is_the_default(self) -> None:
        transport = make_transport(DEFAULT_TRANSPORT, Endpoint("127.0.0.1", 1, False, None), self.MODEL)
        assert isinstance(transport, HttpTransport)
        assert transport.name == "http"

    def test_unknown_and_incomplete(self) -> None:
        endpoint = Endpoint("127.0.0.1", 1, False, None)
        with pytest.raises(UsageError, match="no such transport: saw 'udp'; allowed: http, grpc, shm"):
            make_transport("udp", endpoint, self.MODEL)
        with pytest.raises(
            UsageError, match=r"address is not known; give it, for example --grpc-url 127\.0\.0\.1:8001"
        ):
            make_transport("grpc", endpoint, self.MODEL)

    def test_addresses(self) -> None:
        target = parse_url("http://box:8000", grpc_url="box:8001")
        with target.session(()) as endpoint:
            assert endpoint == Endpoint("box", 8000, False, None, 8001)
        with parse_url("box:8000").session(()) as endpoint:
            assert endpoint.grpc_port is None
        for wrong in ("box", "box:0", "http://box:8001", "box:8001/x"):
            with pytest.raises(UsageError, match="--grpc-url: not the address"):
                parse_url("box:8000", grpc_url=wrong)
        with pytest.raises(UsageError, match="another host's"):
            parse_url("box:8000", grpc_url="crate:8001")


def test_ordinary_memory_is_page_aligned() -> None:
    transport = HttpTransport("127.0.0.1", 1, TestFactory.MODEL)
    memory = transport.payload_memory(5000)
    assert memory.nbytes == 5000
    assert np.frombuffer(memory, np.uint8).ctypes.data % 4096 == 0
    assert bytes(memory) == bytes(5000)
