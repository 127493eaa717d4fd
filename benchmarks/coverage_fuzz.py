"""Fuzzing with coverage guidance (atheris): what strangers can send may raise our errors, and nothing else.

    python benchmarks/coverage_fuzz.py [--minutes 10] [--workers 2]

Targets, chosen by the input's first byte: frames from clients and from proxies, whole or in two pieces; a server's
answer to a batch; records. Held where no input crashes, takes over 1 s of CPU or more than 1 GiB, and at
least 10,000,000 inputs were run, or as many as the machine gives in ten minutes. It starts from the corpus in
tests/data/fuzz_corpus; ``--keep`` adds what newly covers code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "fuzz_corpus"
WANTED = 10_000_000
FULL_MINUTES = 10.0
SLOWEST_S = 1.0


def child(arguments: list[str]) -> None:
    """One fuzzing process; libFuzzer's own arguments. It leaves by itself."""
    import atheris

    with atheris.instrument_imports(include=["b2gmodel"]):
        import fuzz_targets

    def timed(data: bytes) -> None:
        begin_s = time.process_time()  # not the wall's: on a busy machine that would be another's time
        fuzz_targets.one_input(data)
        assert time.process_time() - begin_s < SLOWEST_S, "an input took too long"

    atheris.Setup([sys.argv[0], *arguments], timed)
    atheris.Fuzz()


def fuzz(minutes: float, workers: int, folder: Path) -> tuple[int, list[str]]:
    """Runs of all workers, and what they found."""
    grown = folder / "corpus"
    grown.mkdir()
    limits = [f"-max_total_time={round(60 * minutes)}", "-timeout=30", "-rss_limit_mb=1024", "-max_len=4096"]
    running = []
    for number in range(workers):
        seed = [f"-seed={number + 1}", f"-artifact_prefix={folder}/found-{number}-", str(grown), str(CORPUS)]
        log = (folder / f"log-{number}").open("w+")
        command = [sys.executable, __file__, "--child", *limits, *seed]
        running.append((subprocess.Popen(command, stderr=log, stdout=log, env=_environment()), log))
    runs, findings = 0, [] if running else ["no worker"]
    for process, log in running:
        process.wait()
        log.seek(0)
        text = log.read()
        done = re.findall(r"^(?:Done (\d+) runs|stat::number_of_executed_units:\s*(\d+)|#(\d+))", text, re.MULTILINE)
        runs += max((int(next(filter(None, each))) for each in done), default=0)
        if process.returncode != 0:
            findings.append(f"exit {process.returncode}: {text[-2000:]}")
        log.close()
    findings += [f"{path.name}: {path.read_bytes().hex()}" for path in folder.glob("found-*")]
    return runs, findings


def keep(folder: Path) -> None:
    """Each new input that covered more when it was found, in the project's corpus beside those that are there."""
    for path in (folder / "corpus").iterdir():
        shutil.copy(path, CORPUS / path.name[:16])


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def main() -> int:
    """Prints a row and the verdict as one line of JSON; 1 where the bar is not held."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    parser = argparse.ArgumentParser(description="Fuzz what strangers can send, with coverage guidance.")
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", action="store_true", help="add what was found to cover more to the corpus")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs, findings = fuzz(options.minutes, options.workers, folder)
        if options.keep and not findings:
            keep(folder)
        grown = len(list((folder / "corpus").iterdir()))
    print(f"coverage_fuzz: {runs:,} inputs in {options.minutes:g} min by {options.workers}; {grown} covered more")
    for finding in findings[:10]:
        print(f"  {finding}")
    held = not findings and runs > 0 and (runs >= WANTED or options.minutes >= FULL_MINUTES)
    print(json.dumps({"name": "coverage_fuzz", "value": len(findings), "bar": 0, "held": held, "runs": runs}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
