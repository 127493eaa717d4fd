"""The ledger after kill -9: before each of its writes, in the middle of each, and with many writers at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import builders
import pytest

from b2gmodel.ledger import Ledger
from b2gmodel.ledger_verify import verify
from b2gmodel.records import canonical_bytes

# One process loads the package and forks a child for each step. A child does its work and is killed at one of the
# steps that reach the disk; of a write, half was done. What is left must verify, and take the same work again.
DRIVER = """
import json, os, shutil, signal, sys
from pathlib import Path
from b2gmodel import signing
from b2gmodel.ledger import Ledger
from b2gmodel.ledger_environment import environment_digest
from b2gmodel.ledger_verify import verify
from b2gmodel.records import Prediction

STEPS = ("write", "fsync", "replace", "link", "unlink", "truncate")
base, source, work = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
prediction = Prediction.model_validate_json(source.read_bytes())
software = prediction.software.model_copy(update={"lock_digest": environment_digest()})
prediction = prediction.model_copy(update={"software": software})
signing.sign = lambda content, key: signing.Signature(b"signed", "SHA256:x")

def act(ledger):
    if work == "freeze":
        ledger.freeze(prediction)
        return
    state = ledger.states()[0]
    if work == "measure":
        if not state.measurements:
            ledger.note("measure", state.digest, "m.json", measurement="0" * 64)
    elif work == "begin":
        if not state.unfinished:
            ledger.note("begin", state.digest, "m.json")
    elif work == "sign":
        ledger.sign(ledger.folder / state.file, Path("key"))
    else:
        ledger.abandon(state.digest, "why")

def dying(step, die_at):
    done = getattr(os, step)
    def do(*arguments, **options):
        dying.count += 1
        if dying.count == die_at:
            if step == "write":
                done(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return done(*arguments, **options)
    return do

die_at, found = 0, []
while True:
    die_at += 1
    folder = base.with_name(f"{work}-{die_at}")
    shutil.copytree(base, folder)
    ledger = Ledger(folder)
    if (child := os.fork()) == 0:
        dying.count = 0
        for step in STEPS:
            setattr(os, step, dying(step, die_at))
        try:
            act(ledger)
        finally:
            os._exit(0)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    before = [entry.event for entry in ledger.entries()]
    failed = [name for name in verify(ledger).failed if name != "measurements"] if before else []
    act(ledger)
    after = [entry.event for entry in ledger.entries()]
    ledger.freeze(prediction)  # a writer: it clears up
    parts = [path.name for path in folder.glob(".ledger*.part")]
    found.append([before, failed, after, parts])
    if not killed:
        break
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("work", "frozen", "steps"),
    [
        ("freeze", False, 17),
        ("freeze", True, 13),
        ("begin", True, 5),
        ("measure", True, 5),
        ("sign", True, 8),
        ("abandon", True, 5),
    ],
)
def test_killed_at_each_write(tmp_path: Path, work: str, frozen: bool, steps: int) -> None:
    base, source = tmp_path / "base", tmp_path / "source.json"
    base.mkdir()
    first = [] if not frozen else ["freeze"]
    if frozen:
        Ledger(base).freeze(builders.prediction(builders.calibration(name="first")))
    source.write_bytes(canonical_bytes(builders.prediction()))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(base), str(source), work], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert len(found) > steps
    whole = [*first, work]
    assert {tuple(before) for before, *_ in found} == {tuple(first), tuple(whole)}
    for _, failed, after, parts in found:
        assert (failed, after, parts) == ([], whole, [])


# One process loads the package and forks a child for each source; they wait on a pipe and are let go all at once.
CROWD = """
import os, sys
from pathlib import Path
from b2gmodel.ledger import Ledger
from b2gmodel.records import Prediction
gate, opener = os.pipe()
ledger, children = Ledger(Path(sys.argv[1])), []
for source in sys.argv[2:]:
    if (child := os.fork()) == 0:
        os.close(opener)
        prediction = Prediction.model_validate_json(Path(source).read_bytes())
        os.read(gate, 1)
        ledger.freeze(prediction)
        ledger.entries()
        os._exit(0)
    children.append(child)
os.close(opener)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_twenty_processes_at_once_make_one_chain(tmp_path: Path) -> None:
    """Half of them freeze the same prediction; each reads while others write."""
    ledger = Ledger(tmp_path / "predictions")
    names = [f"cal{number}" for number in range(10)] + ["same"] * 10
    sources = [tmp_path / f"{name}.json" for name in names]
    for source in sources:
        source.write_bytes(canonical_bytes(builders.prediction(builders.calibration(name=source.stem))))
    command = [sys.executable, "-c", CROWD, str(ledger.folder), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[0] * 20}\n"
    files = [entry.file for entry in ledger.entries()]
    assert len(files) == len(set(files)) == 11
    assert {ledger.load_frozen(ledger.folder / file)[0].calibration_name for file in files} == set(names)
    assert verify(ledger).holds
