"""What a recording and a timeline have of gradients on the stand-in for a GPU, on a rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdkit.engine import runtime
from hvdkit.engine.observe.recording import HEAD, RECORDER, STAMPS, clock


def check_records(train: Callable[[], object], steps: int, folder: str) -> None:
    """Train so many steps: both have the GPU's times of every one of them, in order. Between init() and shutdown()."""
    current = runtime.runtime("a test")
    path, began = Path(folder, f"{current.world.rank}.json"), clock()
    current.timeline.start(str(path))
    RECORDER.start()
    try:
        train()
    finally:
        RECORDER.stop()
        current.timeline.stop()
        plans = [plan for plan in RECORDER.take() if not plan.facts.name.endswith(".used")]
    (rounds,) = plans
    rows = np.stack([np.frombuffer(row) for row in rounds.rows])
    assert rows[:, HEAD.index("round")].tolist() == list(range(steps))
    stamps = rows[:, len(HEAD) :].reshape(steps, -1, len(STAMPS))
    assert (np.diff(stamps, axis=2) >= 0).all() and began < stamps.min() and stamps.max() < clock()
    assert (np.diff(stamps[:, -1, STAMPS.index("reduced")]) > 0).all()
    assert (rows[:, HEAD.index("finishing")] <= rows[:, HEAD.index("ended")]).all()
    drawn = [one["name"] for one in json.loads(path.read_text()) if one.get("ph") == "B"]
    assert drawn.count("ALLREDUCE") >= steps == drawn.count("ALLREDUCE") // (drawn.count("ALLREDUCE") // steps)
