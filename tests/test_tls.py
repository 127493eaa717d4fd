"""TLS in front of the proxy: who comes in, who does not, and what unfinished handshakes may cost."""

from __future__ import annotations

import asyncio
import socket
import ssl
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from proxy_rig import Rig, rig, run
from test_serve import MODEL, served

from b2gmodel.errors import UsageError
from b2gmodel.live.arrays import Array
from b2gmodel.live.client import AsyncClient, Client, ConnectionLost
from b2gmodel.live.fake import FakeScript, FakeServer
from b2gmodel.live.load import ClosedLoop, LoadSpec, run_load
from b2gmodel.live.observer import Outcome
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.tls import ClientTls, ServerTls

X = np.array([7, 0], dtype=np.int32)


@dataclass(frozen=True)
class Certificates:
    """Files of an authority that signs the proxy and a client, and of a stranger's own."""

    server: ServerTls
    client: ClientTls
    stranger: ClientTls


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("tls")

    def write(name: str, blob: trustme.Blob) -> str:
        blob.write_to_path(str(folder / name))
        return str(folder / name)

    def issue(authority: trustme.CA, name: str) -> tuple[str, str]:
        issued = authority.issue_cert("127.0.0.1", common_name=name)
        return write(f"{name}.pem", issued.cert_chain_pems[0]), write(f"{name}.key", issued.private_key_pem)

    ours, other = trustme.CA(), trustme.CA()
    ca = write("ca.pem", ours.cert_pem)
    return Certificates(
        ServerTls(*issue(ours, "proxy"), ca),
        ClientTls(ca, *issue(ours, "client")),
        ClientTls(ca, *issue(other, "stranger")),
    )


async def ask(it: Rig, tls: ClientTls | None) -> dict[str, Array]:
    async with AsyncClient(*it.address, tls=tls, timeout_s=20) as client:
        asked = asyncio.ensure_future(client.infer("m", {"x": X}))
        batch = asyncio.ensure_future(it.batch())
        await asyncio.wait({asked, batch}, return_when=asyncio.FIRST_COMPLETED)
        if batch.done():
            batch.result().succeed()
        else:
            batch.cancel()
        return await asked


class TestMutual:
    def test_a_client_with_a_certificate_is_answered(self, files: Certificates) -> None:
        async def test() -> None:
            async with rig(tls=files.server.context()) as it:
                answer = await ask(it, files.client)
                assert np.array_equal(np.asarray(answer["y"]), X)
                assert it.count(Outcome.ANSWERED) == 1

        run(test())

    @pytest.mark.parametrize("who", ["none", "stranger", "plain"])
    def test_one_without_gets_nothing(self, files: Certificates, who: str) -> None:
        async def test() -> None:
            tls = {"none": ClientTls(files.client.ca), "stranger": files.stranger, "plain": None}[who]
            async with rig(tls=files.server.context()) as it:
                with pytest.raises(ConnectionLost):
                    await ask(it, tls)
                assert it.proxy.snapshot().received == 0

        run(test())

    def test_without_a_client_ca_anybody_who_trusts_the_proxy_comes_in(self, files: Certificates) -> None:
        async def test() -> None:
            async with rig(tls=replace(files.server, client_ca=None).context()) as it:
                await ask(it, ClientTls(files.client.ca))
                assert it.count(Outcome.ANSWERED) == 1

        run(test())

    def test_a_client_does_not_talk_to_a_proxy_that_its_authority_did_not_sign(
        self, files: Certificates, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.pem"
        trustme.CA().cert_pem.write_to_path(str(other))

        async def test() -> None:
            async with rig(tls=files.server.context()) as it:
                with pytest.raises(ConnectionLost, match="verify failed"):
                    await ask(it, replace(files.client, ca=str(other)))

        run(test())

    def test_old_protocols_are_refused(self, files: Certificates) -> None:
        async def test() -> None:
            async with rig(tls=files.server.context()) as it:
                old = files.client.context()
                with warnings.catch_warnings(action="ignore"):
                    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await asyncio.open_connection(*it.address, ssl=old)

        run(test())


class TestHandshakes:
    async def silent(self, it: Rig, count: int) -> list[socket.socket]:
        """Connections that never say a word."""
        loop, opened = asyncio.get_running_loop(), []
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, it.address)
            opened.append(sock)
        return opened

    def listener(self, it: Rig) -> Any:
        return it.proxy._server

    def test_those_beyond_the_bound_are_closed_and_the_others_time_out(self, files: Certificates) -> None:
        async def test() -> None:
            async with rig(tls=files.server.context(), frame_timeout_s=0.5) as it:
                opened = await self.silent(it, 140)
                listener = self.listener(it)
                while listener.failed < 12:
                    assert listener.unfinished <= 128
                    await asyncio.sleep(0)
                # The rest is let go when its time is up, and then a client gets through.
                while listener.unfinished:
                    await asyncio.sleep(0.01)
                assert listener.failed == 140
                await ask(it, files.client)
                for sock in opened:
                    sock.close()

        run(test())

    def test_a_silent_one_does_not_hold_up_the_others(self, files: Certificates) -> None:
        async def test() -> None:
            async with rig(tls=files.server.context()) as it:
                (sock,) = await self.silent(it, 1)
                await ask(it, files.client)
                assert self.listener(it).unfinished == 1
                sock.close()

        run(test())

    def test_a_handshake_is_no_connection_of_the_proxy(self, files: Certificates) -> None:
        async def test() -> None:
            async with rig(tls=files.server.context()) as it:
                opened = await self.silent(it, 3)
                while self.listener(it).unfinished < 3:
                    await asyncio.sleep(0)
                assert it.proxy.snapshot().connections == 0
                for sock in opened:
                    sock.close()

        run(test())

    def test_one_under_way_ends_with_the_proxy(self, files: Certificates) -> None:
        """Once the proxy is closed no handshake is left behind, and the silent one reads the end."""

        async def test() -> None:
            async with rig(tls=files.server.context()) as it:
                (sock,) = await self.silent(it, 1)
                listener = self.listener(it)
                while not listener.unfinished:
                    await asyncio.sleep(0)
                listener.close()
                await listener.wait_closed()
                assert listener.unfinished == 0
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
                sock.close()

        run(test())


class TestFiles:
    def test_a_key_of_another_certificate(self, files: Certificates) -> None:
        with pytest.raises(UsageError, match="the certificate or its key cannot be used"):
            replace(files.server, key=str(files.client.key)).context()

    def test_a_missing_file(self, files: Certificates) -> None:
        with pytest.raises(UsageError, match="No such file"):
            replace(files.server, client_ca="nowhere.pem").context()

    def test_a_file_that_is_none(self, files: Certificates, tmp_path: Path) -> None:
        bad = tmp_path / "bad.pem"
        bad.write_text("not a certificate")
        with pytest.raises(UsageError, match="--tls-ca"):
            replace(files.client, ca=str(bad)).context()

    def test_a_key_with_a_passphrase_asks_nobody(self, files: Certificates, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives import serialization

        key = serialization.load_pem_private_key(Path(files.server.key).read_bytes(), None)
        locked = tmp_path / "locked.key"
        locked.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
        with pytest.raises(UsageError, match="passphrase"):
            replace(files.server, key=str(locked)).context()

    def test_a_certificate_without_its_key(self, files: Certificates) -> None:
        with pytest.raises(UsageError, match="go together"):
            ClientTls(files.client.ca, files.client.certificate)


class TestProcesses:
    """``b2g serve`` and ``b2g load``, over TLS."""

    def options(self, files: Certificates) -> list[str]:
        server = files.server
        return ["--tls-cert", server.certificate, "--tls-key", server.key, "--tls-client-ca", str(server.client_ca)]

    def test_a_load_is_answered_and_a_plain_client_is_not(self, files: Certificates) -> None:
        with (
            FakeServer.start(FakeScript((MODEL,))) as fake,
            served(f"http://{fake.address}", "m", *self.options(files)) as proxy,
        ):
            inputs = (TensorSpec("x", "FP32", (4, 3)),)
            loop = ClosedLoop(4)
            spec = LoadSpec(proxy.host, proxy.port, "m", inputs, loop, 0.4, 0.1, tls=files.client)
            result = run_load(spec)
            assert result.window_answers > 0
            with Client(proxy.host, proxy.port, tls=files.client, timeout_s=20) as client:
                client.infer("m", {"x": np.zeros((4, 3), np.float32)})
            for tls in (None, ClientTls(files.client.ca), files.stranger):
                with Client(proxy.host, proxy.port, tls=tls, timeout_s=20) as client, pytest.raises(ConnectionLost):
                    client.infer("m", {"x": np.zeros((4, 3), np.float32)})
            code, out, _ = proxy.stop()
            assert code == 0
            assert f"served: {result.sent + 1} requests = {result.sent + 1} answered" in out


def test_a_public_address_needs_tls(files: Certificates) -> None:
    async def test() -> None:
        with pytest.raises(UsageError, match="without TLS"):
            async with rig(host="0.0.0.0"):
                pass
        async with rig(host="0.0.0.0", tls=files.server.context()) as it:
            assert it.address[0] == "0.0.0.0"

    run(test())
