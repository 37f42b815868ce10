"""Run scripts one after another on the ranks that hvdrun has started; rank 0 tells as JSON what came out of each.

python migrated_scripts.py torch|keras RESULT SCRIPT...: each script leaves a `model` and a number `final`.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np


def weights_of(model: Any) -> list[Any]:
    """The numbers that ranks must agree on."""
    if hasattr(model, "get_weights"):
        return list(model.get_weights())
    return [parameter.detach().numpy() for parameter in model.parameters()]


def main(framework: str, result: str, *scripts: str) -> None:
    """Run them."""
    hvd = importlib.import_module(f"hvdkit.{framework}")
    told = {}
    for script in scripts:
        faulthandler.dump_traceback_later(45, exit=True)  # a script that waits for ever says where
        left = runpy.run_path(script, run_name="__main__")
        weights, final = weights_of(left["model"]), left["final"]
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in weights)).hexdigest()
        del left, weights
        gc.collect()  # optimizers are dropped on all ranks at the same point, also those in cycles
        hvd.init()  # some scripts leave with hvd.shutdown()
        told[Path(script).stem] = {"weights": hvd.allgather_object(digest), "final": hvd.allgather_object(final)}
    if hvd.rank() == 0:
        Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
