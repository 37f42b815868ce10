"""`python -m hvdkit.launch.run_worker FOLDER`: a rank of hvdkit.launch(), which calls the function."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

from hvdkit.config import read_environment
from hvdkit.launch.function_outcome import FunctionOutcome, describe_error, own_frames, pickle_outcome
from hvdkit.launch.function_results import FUNCTION, Result, result_name
from hvdkit.optional_import import optional_import
from hvdkit.world import read_world


def main(folder: Path) -> None:
    """Load the function, call it and write its value or exception; an exception then ends this process."""
    dumps = optional_import("cloudpickle", "run").dumps
    world = read_world()

    def leave(outcome: FunctionOutcome) -> FunctionOutcome:
        outcome, data = pickle_outcome(outcome, dumps)
        variables = read_environment()
        start = int(variables.get("HVDKIT_START", "1"))
        rank = int(variables.get("HOROVOD_RANK", world.rank))  # the rank may have changed in an elastic job
        name = result_name(world.host, os.getpid(), start)
        part = folder / f"{name}.part"  # the file is read as soon as it has its final name
        part.write_bytes(pickle.dumps(Result(rank, world.host, time.time(), outcome.raised, data, start)))
        os.replace(part, folder / name)
        return outcome

    try:
        func, args, kwargs, path = pickle.loads((folder / FUNCTION).read_bytes())
        sys.path += [place for place in path if place not in sys.path]
        value = func(*args, **kwargs)
    except BaseException as error:
        leave(describe_error(error, dumps))
        if not isinstance(error, Exception):
            raise
        # As Python would, but without the frames of runpy and of this file. After init() this ends the job.
        sys.excepthook(type(error), error, own_frames(error))
        sys.exit(1)
    leave(FunctionOutcome(value)).get(f"rank {world.rank} on {world.host}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
