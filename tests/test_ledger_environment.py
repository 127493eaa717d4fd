"""The lock of the environment: all that is installed, and nothing that depends on how it was found."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import builders
import pytest

from b2gmodel.ledger import Ledger
from b2gmodel.ledger_environment import environment_digest, environment_lock, lock_file
from b2gmodel.ledger_verify import verify
from b2gmodel.live.host import describe_software
from b2gmodel.records import Software, canonical_bytes

DIGEST = "0123456789abcdef" * 4


@dataclass
class Installed:
    name: str | None
    version: str


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names in many spellings, one twice, one of something half removed."""
    found = [
        Installed("Zope.Interface", "7.0"),
        Installed("a-b", "2"),
        Installed("a", "1"),
        Installed(None, "3"),
        Installed("typing__extensions", "4"),
        Installed("A", "0.9"),
    ]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    environment_lock.cache_clear()
    yield
    environment_lock.cache_clear()


def test_what_is_installed_here() -> None:
    lines = environment_lock().splitlines()
    assert f"numpy=={importlib.metadata.version('numpy')}" in lines
    assert lines == sorted(set(lines))
    assert {line.count("==") for line in lines} == {1}


def test_names_are_normalised_sorted_and_of_two_the_first(planted: None) -> None:
    lock = b"a-b==2\na==1\ntyping-extensions==4\nzope-interface==7.0\n"
    assert environment_lock().encode() == lock
    assert environment_digest() == hashlib.sha256(lock).hexdigest()


def test_the_file_is_named_by_its_digest() -> None:
    assert lock_file(DIGEST) == "environment-0123456789ab.txt"


def test_what_predicts_and_measures_states_it() -> None:
    assert describe_software().lock_digest == environment_digest()


def test_a_record_without_one_has_the_bytes_that_it_had_before() -> None:
    without = b'{"b2gmodel":"0","commit":null,"packages":{},"python":"3"}'
    assert canonical_bytes(builders.SOFTWARE) == without
    assert Software.model_validate_json(without) == builders.SOFTWARE
    stated = builders.SOFTWARE.model_copy(update={"lock_digest": DIGEST})
    assert json.loads(canonical_bytes(stated)) == json.loads(without) | {"lock_digest": DIGEST}
    assert Software.model_validate_json(canonical_bytes(stated)) == stated


def test_the_ledger_that_is_kept_with_the_project_holds() -> None:
    verification = verify(Ledger(Path(__file__).parents[1] / "predictions"))
    assert (verification.failed, verification.strays) == ((), ())
