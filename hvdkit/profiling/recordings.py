"""What the ranks of a job recorded, as numbers, and the file that holds it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.engine.observe.recording import PlanFacts, RankFacts, Rounds
from hvdkit.errors import ProfileError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RankRecording:
    """Of one rank. plans: what it reduced, with a row for each round, (rounds, facts.row); see observe/recording.py."""

    facts: RankFacts
    plans: list[tuple[PlanFacts, Floats]] = field(default_factory=list)


def as_rows(facts: PlanFacts, data: bytes) -> Floats:
    """Rounds as they were sent."""
    return np.frombuffer(data, np.float64).reshape(-1, facts.row)


def as_recording(facts: RankFacts, taken: Sequence[Rounds]) -> RankRecording:
    """What a rank's recorder gave, as numbers."""
    return RankRecording(facts, [(one.facts, as_rows(one.facts, b"".join(one.rows))) for one in taken])


def parse_facts(facts: Mapping[str, Any]) -> RankFacts:
    """RankFacts out of JSON."""
    link = facts["link"]
    return RankFacts(**{**facts, "link": None if link is None else tuple(link)})


def parse_plan(facts: Mapping[str, Any]) -> PlanFacts:
    """PlanFacts out of JSON."""
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    return PlanFacts(**made)


def write_recordings(recordings: Sequence[RankRecording], path: Path) -> None:
    """Write them to a file of numpy's, .npz whatever its name."""
    arrays: dict[str, Any] = {}
    about = []
    for number, one in enumerate(recordings):
        about.append({"facts": asdict(one.facts), "plans": [asdict(facts) for facts, _ in one.plans]})
        arrays.update({f"{number}/{at}": rows for at, (_, rows) in enumerate(one.plans)})
    with path.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def read_recordings(path: Path) -> list[RankRecording]:
    """Read what write_recordings() wrote. Raises ProfileError for any other file."""
    try:
        with np.load(path) as arrays:
            return [
                RankRecording(
                    parse_facts(one["facts"]),
                    [(parse_plan(facts), arrays[f"{number}/{at}"]) for at, facts in enumerate(one["plans"])],
                )
                for number, one in enumerate(json.loads(str(arrays["about"])))
            ]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ProfileError(f"{path} is no recording: {error}. `hvdkit profile --save FILE` writes one.") from None
