"""C1, C2, C3 and C4 of the real models as a small study, predicted before it is run: ``python study.py OUT ...``.

The embedded server runs for all of it, and the study takes it as a server that is there already.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from b2gmodel.cli import run
from b2gmodel.errors import B2GError
from b2gmodel.live.engines import parse_compute
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.target import EmbeddedTarget

PLAN = """
name = "gpu"
seed = 1
sessions = 2
repetitions = 1
seconds_per_run = 0.5
warmup_rounds = 2
placements = ["C1", "C2", "C3", "C4"]
k = [{k}]
flights = [2]
concurrency = [{clients}]

[server]
kind = "url"
url = "{url}"
"""
WORKLOAD = """
[[workload]]
name = "{name}"
dynamic_model = "{name}_dynamic"
null_model = "{name}_null"
"""


def main() -> int:
    options = _options()
    target = EmbeddedTarget.of(parse_compute(options.compute))
    out = str(options.out)
    with EmbeddedServer.start(target.table, options.model, engine=target.engine) as server:
        url = "http://{}:{}".format(*server.http_address)
        file = options.out.with_suffix(".toml")
        workloads = "".join(WORKLOAD.format(name=name) for name in options.model)
        file.write_text(PLAN.format(k=options.k, clients=options.clients, url=url) + workloads)
        for arguments in (
            ["study", "plan", str(file), "--out", out],
            ["study", "calibrate", out, "--budget", "3s", "-q"],
            ["study", "predict", out],
            ["study", "run", out, "-q"],
        ):
            code = run(arguments)
            if code != 0:
                return code
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--compute", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except B2GError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
