"""The kept corpus of the coverage-guided fuzzing, run again: what once reached new code still does no harm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fuzz_targets

CORPUS = Path(__file__).parent / "data" / "fuzz_corpus"


def test_every_input_of_the_corpus_is_taken_or_refused() -> None:
    inputs = [path.read_bytes() for path in CORPUS.iterdir()]
    assert len(inputs) >= len(fuzz_targets.TARGETS)
    for data in inputs:
        fuzz_targets.one_input(data)


def test_the_seeds_are_sound() -> None:
    """So that the fuzzing begins behind the first check, each seed must reach the end of its target."""
    kinds = {seed[0] for seed in fuzz_targets.seeds()}
    assert kinds == set(range(len(fuzz_targets.TARGETS)))
    for seed in fuzz_targets.seeds():
        fuzz_targets.one_input(seed)


def test_a_defect_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: bytes) -> None:
        raise IndexError

    monkeypatch.setattr(fuzz_targets, "TARGETS", (careless,))
    with pytest.raises(IndexError):
        fuzz_targets.one_input(b"\x00x")
