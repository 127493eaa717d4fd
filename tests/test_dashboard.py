"""The dashboard as code: a real Prometheus, with the repository's configuration, answers each of its queries."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import run
from telemetry_rig import MODEL, fetch, load, watched

from b2gmodel.live.exporters import Export
from b2gmodel.live.fake import FakeScript, FakeServer
from b2gmodel.live.telemetry import INSTRUMENTS

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = [each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer.start(FakeScript((MODEL,))) as server:
        yield server


class Prometheus:
    """A running Prometheus's HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def emptiness(self, query: str) -> str | None:
        """Why a query of the dashboard shows nothing, or None where it shows something.

        ``label_values(METRIC, LABEL)`` is Grafana's own function; the rest goes to Prometheus with Grafana's
        variables filled in. A result that is not a number everywhere shows nothing.
        """
        of_label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        if of_label:
            values = self._ask(f"label/{of_label[2]}/values", {"match[]": of_label[1]})
            return None if values else "no values"
        expression = query.replace("$__rate_interval", "5s").replace("$model", ".*")
        assert "$" not in expression, f"an unknown variable in {query}"
        result = self._ask("query", {"query": expression})["result"]
        if not result:
            return "no series"
        return "not a number" if all(math.isnan(float(each["value"][1])) for each in result) else None

    def _ask(self, path: str, arguments: dict[str, str]) -> Any:
        answer = json.loads(fetch(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"))
        assert answer["status"] == "success"
        return answer["data"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """A Prometheus with the repository's configuration, but for the target and a scrape each second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("the program prometheus is not installed: apt-get install prometheus")
    text = (ROOT / "deploy" / "prometheus.yml").read_text()
    assert (text.count("127.0.0.1:9464"), text.count("scrape_interval: 5s")) == (1, 1)
    config = folder / "prometheus.yml"
    config.write_text(text.replace("127.0.0.1:9464", target).replace("scrape_interval: 5s", "scrape_interval: 1s"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


async def _emptiness(server: Prometheus, queries: list[str]) -> dict[str, str]:
    found = {}
    for query in queries:
        reason = await asyncio.to_thread(server.emptiness, query)
        if reason is not None:
            found[query] = reason
    return found


@pytest.mark.real
def test_no_query_of_the_dashboard_is_empty(fake: FakeServer, tmp_path: Path) -> None:
    async def watch() -> None:
        async with watched(fake, Export(port=0, poll_s=0.3)) as it, load(it, 12):
            assert it.telemetry.scrape_url is not None
            target = urllib.parse.urlsplit(it.telemetry.scrape_url).netloc
            with prometheus(tmp_path, target) as server:
                empty: dict[str, str] = {"nothing asked yet": ""}
                with suppress(TimeoutError):
                    async with asyncio.timeout(25):
                        while empty:
                            await asyncio.sleep(0.5)
                            with suppress(urllib.error.URLError):  # not listening yet
                                empty = await _emptiness(server, [*QUERIES, *VARIABLES])
                assert empty == {}
                misspelt = ["sum(rate(b2g_request_end_total[5s]))", "label_values(b2g_queue_dept, b2g_model)"]
                undefined = "0 * b2g_queue_depth / 0"
                assert await _emptiness(server, [*misspelt, undefined, "b2g_queue_depth"]) == {
                    misspelt[0]: "no series",
                    misspelt[1]: "no values",
                    undefined: "not a number",
                }

    run(watch())


@pytest.mark.real
def test_prometheus_accepts_the_configuration_as_it_is() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("the program promtool is not installed: apt-get install prometheus")
    done = subprocess.run(
        [program, "check", "config", str(ROOT / "deploy" / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_dashboard_shows_every_instrument() -> None:
    units = {"s": "_seconds", "By": "_bytes"}
    everything = "\n".join(QUERIES)
    assert len(QUERIES) > 20
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for it in INSTRUMENTS:
        exported = it.name.replace(".", "_") + units.get(it.unit, "") + ("_total" if it.kind == "counter" else "")
        assert re.search(rf"\b{exported}(_sum|_count|_bucket)?\{{", everything), exported
