"""The ledger with 200 writers at once, and with writers killed by SIGKILL at random moments.

    python benchmarks/ledger_crash.py [--writers 200] [--kills 100] [--seed 1]

Held where the writers leave one valid chain with none of theirs lost, and where after each kill the ledger verifies
with every event that the writer had been told was entered, at most one more, and takes the next.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import builders

from b2gmodel.ledger import Ledger
from b2gmodel.ledger_verify import verify
from b2gmodel.records import Measurement, Prediction, digest_of
from b2gmodel.store import write_record, write_table

ROUNDS = 8
EVENTS = 3 * ROUNDS  # each frozen, begun and measured
Pair = tuple[Prediction, Measurement]


def in_child(work: Callable[[], None]) -> int:
    """Fork, do ``work`` there, and leave; the child's id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def crowd(folder: Path, predictions: list[Prediction]) -> int:
    """All are frozen at once, each by a process of its own; how many are in the ledger afterwards, whole."""
    ledger, (gate, opener) = Ledger(folder), os.pipe()

    def freeze(prediction: Prediction) -> None:
        os.close(opener)
        os.read(gate, 1)
        ledger.freeze(prediction)

    children = [in_child(lambda prediction=prediction: freeze(prediction)) for prediction in predictions]
    os.close(opener)
    for child in children:
        os.waitpid(child, 0)
    os.close(gate)
    if not verify(ledger).holds:
        return 0
    return len({entry.digest for entry in ledger.entries()} & {digest_of(each) for each in predictions})


def freeze_and_measure(ledger: Ledger, pairs: list[Pair], told: int) -> None:
    """Freeze each, begin a measurement and enter it, and write a byte for each event that was entered."""
    for prediction, measured in pairs:
        ledger.freeze(prediction)
        os.write(told, b"f")
        ledger.note("begin", digest_of(prediction), f"{measured.name}.json")
        os.write(told, b"b")
        raw = write_table(ledger.folder / f"{measured.name}.parquet", {"cycle_ns": list(range(1000))})
        whole = measured.model_copy(update={"raw": raw})
        path = write_record(ledger.folder / f"{measured.name}.json", whole)
        ledger.note("measure", digest_of(prediction), path.name, measurement=digest_of(whole))
        os.write(told, b"m")


def duration_s(folder: Path, pairs: list[Pair]) -> float:
    """How long it takes unkilled, in this process; the first time loads what is needed."""
    told = os.open(os.devnull, os.O_WRONLY)
    began_s = time.monotonic()
    freeze_and_measure(Ledger(folder), pairs, told)
    os.close(told)
    return time.monotonic() - began_s


def killed(folder: Path, pairs: list[Pair], after_s: float) -> tuple[int, int, bool]:
    """Events told, events in the ledger, and whether it verifies and takes the next event."""
    ledger, (heard, told) = Ledger(folder), os.pipe()
    child = in_child(lambda: freeze_and_measure(ledger, pairs, told))
    os.close(told)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    events = len(os.read(heard, 1000))
    os.close(heard)
    entered = len(ledger.entries())
    sound = entered == 0 or verify(ledger).holds
    ledger.freeze(builders.prediction(builders.calibration(name="next")))
    return events, entered, sound and verify(ledger).holds and len(ledger.entries()) == entered + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    of_one = builders.prediction()
    predictions = [of_one.model_copy(update={"name": f"p{number}"}) for number in range(options.writers)]
    measured = builders.measurement(of_one, {1: [320.0, 321.0], 3: [600.0, 601.0]})
    pairs = [
        (each, measured.model_copy(update={"name": f"m{number}", "prediction_digest": digest_of(each)}))
        for number, each in enumerate(predictions[:ROUNDS])
    ]
    with tempfile.TemporaryDirectory(prefix="b2g-ledger-") as folder:
        began_s = time.monotonic()
        kept = crowd(Path(folder) / "crowd", predictions)
        print(f"{options.writers} writers at once: {kept} in one chain, {time.monotonic() - began_s:.1f} s")
        longest_s = min(duration_s(Path(folder) / f"whole{number}", pairs) for number in range(2))
        good, unfinished, counts = 0, 0, []
        for kill in range(options.kills):
            events, entered, sound = killed(Path(folder) / f"kill{kill}", pairs, moments.uniform(0, longest_s))
            good += sound and events <= entered <= events + 1
            unfinished += events < EVENTS
            counts.append(entered)
        print(
            f"{options.kills} kills, {unfinished} of them before the writer was done, with {min(counts)} to "
            f"{max(counts)} events entered: {good} ledgers verify, with at most the last event missing"
        )
    held = kept == options.writers and good == options.kills and unfinished >= options.kills // 2
    value = {"writers_kept": kept, "kills_survived": good}
    bar = {"writers_kept": options.writers, "kills_survived": options.kills}
    print(json.dumps({"name": "ledger_crash", "value": value, "bar": bar, "held": held, "spread": None}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
