"""Runs the plan on this machine within its minutes, and writes all to one folder: ``run.sh`` calls it.

Steps are commands of ``b2g`` in processes of their own, so that one that fails or hangs costs its own time alone. The
GPU is read all the while where there is one.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from plan import CPU, GPU, plan
from steps import NS_PER_S, Outcome, State, Step, exit_code, run_steps

from b2gmodel.errors import B2GError
from b2gmodel.live.doctor import run_checks
from b2gmodel.live.engines import Emulated, Engine, find_engine, parse_compute
from b2gmodel.live.gpu import Gpu, GpuSample, GpuWatch, means
from b2gmodel.live.host import describe_host, describe_software

CLOSING_S = 12
"""Kept back from the minutes, for stopping what runs and for writing."""
GRACE_S = 5.0
ORDER = ("torch", "onnx")
"""Engines where none is named: the first that has a GPU, else onnxruntime on the CPU."""


def main() -> int:
    out = Path(sys.argv[1])
    begun_s = float(os.environ.get("B2G_BEGUN") or time.time())
    try:
        minutes = float(os.environ.get("B2G_MINUTES") or 8)
        compute, engine = _engine(os.environ.get("B2G_COMPUTE"))
    except (ValueError, B2GError) as error:
        print(f"run.sh: {error}", file=sys.stderr)
        return 2
    deadline_ns = time.monotonic_ns() + round((60 * minutes - CLOSING_S - (time.time() - begun_s)) * NS_PER_S)
    gpu = Gpu.find()
    (out / "environment.json").write_text(json.dumps(_environment(engine, gpu), indent=1) + "\n")
    print(f"run.sh: {engine.sentence}; {minutes:g} minutes; everything goes to {out}", flush=True)
    with GpuWatch(gpu) as watch:
        idle_ns = time.monotonic_ns()
        time.sleep(2.0 if gpu is not None else 0.0)
        idle = means(watch.samples, idle_ns, time.monotonic_ns())
        steps = plan(out, compute, GPU if engine.on_gpu else CPU)
        outcomes = run_steps(steps, deadline_ns, time.monotonic_ns, lambda step, left_s: _execute(step, left_s, out))
    _write_samples(out / "gpu.csv", watch.samples)
    took_s = time.time() - begun_s
    rows = [{**asdict(each), "gpu": _gpu_during(each, watch.samples)} for each in outcomes]
    summary = {"compute": compute, "minutes": minutes, "took_s": took_s, "gpu_idle": idle, "steps": rows}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    _say(outcomes, took_s, out)
    _pack(out)
    return exit_code(outcomes)


def _engine(text: str | None) -> tuple[str, Engine]:
    """The engine that was named; else the first with a GPU, else onnxruntime on the CPU.

    Raises:
        B2GError: the one that was named cannot compute here, or is no engine.
    """
    if text:
        wish = parse_compute(text, where="B2G_COMPUTE")
        if isinstance(wish, Emulated):
            raise ValueError("B2G_COMPUTE: emulated compute needs no GPU: b2g demo shows it")
        return text, find_engine(wish)
    for name in ORDER:
        try:
            return name, _on_gpu(name)
        except B2GError as error:
            print(f"run.sh: {error}", file=sys.stderr)
    return _engine("onnx:cpu")


def _on_gpu(name: str) -> Engine:
    wish = parse_compute(f"{name}:cuda")
    assert not isinstance(wish, Emulated)
    return find_engine(wish)


def _environment(engine: Engine, gpu: Gpu | None) -> dict[str, Any]:
    return {
        "host": describe_host().model_dump(mode="json"),
        "software": describe_software().model_dump(mode="json"),
        "engine": asdict(engine),
        "gpu": None if gpu is None else asdict(gpu.facts()),
        "checks": [{"name": c.name, "state": c.state.value, "seen": c.observed} for c in run_checks(False)],
    }


def _execute(step: Step, left_s: float, out: Path) -> int | None:
    """Run a step's command, its output in ``logs``; None where its time was over and it had to be stopped."""
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    arguments = [found for each in step.arguments for found in _expanded(each)]
    print(f"  {step.name} ...", flush=True)
    with (logs / f"{step.name}.txt").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(left_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _expanded(argument: str) -> list[str]:
    """A pattern's file, which there is only once the step before has run."""
    if "*" not in argument:
        return [argument]
    return glob.glob(argument)[:1] or [argument]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a step: its server ends with the process that started it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(GRACE_S / 2)
        except subprocess.TimeoutExpired:
            continue


def _gpu_during(outcome: Outcome, samples: list[GpuSample]) -> dict[str, float | None] | None:
    if outcome.begin_ns is None or outcome.end_ns is None or not samples:
        return None
    return means(samples, outcome.begin_ns, outcome.end_ns)


def _write_samples(path: Path, samples: list[GpuSample]) -> None:
    """No file where there was no GPU to read."""
    if samples:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(GpuSample)])
            writer.writeheader()
            writer.writerows(asdict(sample) for sample in samples)


def _say(outcomes: list[Outcome], took_s: float, out: Path) -> None:
    done = [each for each in outcomes if each.state is State.DONE]
    lines = [f"run.sh: {len(done)} of {len(outcomes)} steps done in {took_s:.0f} s"]
    for each in outcomes:
        verdict = _first_line(out / "logs" / f"{each.name}.txt") if each.state is State.DONE else each.why
        lines.append(f"  {each.state:<11}  {each.name:<21}  {verdict}")
    (out / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def _first_line(path: Path) -> str:
    """What a command said first, which is its answer; progress is not."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(" ")), "")


def _pack(out: Path) -> None:
    """All but the models in one file, to carry away."""
    with tarfile.open(out / "everything.tgz", "w:gz") as pack:
        for path in sorted(out.iterdir()):
            if path.name not in ("cache", "venv", "everything.tgz"):
                pack.add(path, f"{out.name}/{path.name}")


if __name__ == "__main__":
    sys.exit(main())
