"""What has become of each frozen prediction, by the ledger's lines: the file drawer, and what was judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from b2gmodel.ledger_lines import Entry, EventKind


@dataclass(frozen=True, slots=True)
class Begun:
    """A measurement that was begun: its name, and when, by the wall clock."""

    name: str
    at: str


@dataclass(frozen=True, slots=True)
class State:
    """What has become of a frozen prediction.

    Attributes:
        frozen_at: by the wall clock.
        signer: fingerprint of the key that signed it, as the ledger states it.
        measurements: digests of those entered, in order.
        unfinished: measurements that were begun and never entered: they go on, failed, or were dropped.
        judged: digests of the measurements that have an outcome.
        outcomes: in order; more than one where it was measured or judged more than once.
        reason: why it was abandoned, or None.
    """

    digest: str
    file: str
    frozen_at: str
    signer: str | None
    measurements: tuple[str, ...]
    unfinished: tuple[Begun, ...]
    judged: tuple[str, ...]
    outcomes: tuple[str, ...]
    reason: str | None

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Measurements of it that were entered, and never judged."""
        return tuple(each for each in self.measurements if each not in self.judged)

    @property
    def stage(self) -> Literal["frozen", "measured", "judged", "abandoned"]:
        """How far it has come. An outcome counts, even of a prediction that was abandoned."""
        if self.outcomes:
            return "judged"
        if self.reason is not None:
            return "abandoned"
        return "measured" if self.measurements else "frozen"

    @property
    def is_open(self) -> bool:
        """Whether it lies in the file drawer: no outcome, and nobody said why."""
        return self.stage in {"frozen", "measured"}


def states(entries: Sequence[Entry]) -> list[State]:
    """What has become of each frozen prediction, in the order of freezing."""

    def of(frozen: Entry) -> State:
        own = [entry for entry in entries if entry.digest == frozen.digest]
        by_event = {event: [entry for entry in own if entry.event == event] for event in get_args(EventKind)}
        return State(
            digest=frozen.digest,
            file=frozen.file,
            frozen_at=frozen.facts["at"],
            signer=next((str(entry.facts.get("signer")) for entry in by_event["sign"]), None),
            measurements=tuple(str(entry.facts.get("measurement", entry.file)) for entry in by_event["measure"]),
            unfinished=_unfinished(own),
            judged=tuple(str(entry.facts.get("measurement")) for entry in by_event["outcome"]),
            outcomes=tuple(str(entry.facts.get("outcome")) for entry in by_event["outcome"]),
            reason=next((str(entry.facts.get("reason")) for entry in by_event["abandon"]), None),
        )

    return [of(entry) for entry in entries if entry.event == "freeze"]


def _unfinished(own: Sequence[Entry]) -> tuple[Begun, ...]:
    """A measurement ends the last beginning of its name, so that one dropped under the same name before is seen."""
    begun: list[Entry] = []
    for entry in own:
        if entry.event == "begin":
            begun.append(entry)
        elif entry.event == "measure":
            ended = next((each for each in reversed(begun) if each.file == entry.file), None)
            begun = [each for each in begun if each is not ended]
    return tuple(Begun(entry.file.removesuffix(".json"), entry.facts["at"]) for entry in begun)


def count_states(of: Sequence[State]) -> dict[str, int]:
    """How many predictions have come how far; ``open`` are those without an outcome of which nobody said why."""
    stages = [state.stage for state in of]
    return {
        "frozen": len(of),
        "open": sum(state.is_open for state in of),
        "unmeasured": stages.count("frozen"),
        "measured": stages.count("measured"),
        "judged": stages.count("judged"),
        "abandoned": stages.count("abandoned"),
        "unjudged_measurements": sum(len(state.unjudged) for state in of),
        "unfinished_measurements": sum(len(state.unfinished) for state in of),
    }
