"""A rank of a test on GPUs: `python gpu_rank.py MODULE:FUNCTION FOLDER ARGUMENTS` calls it and leaves what it returns.

ARGUMENTS: of the call, as JSON. What it returns is written as JSON to FOLDER/RANK.json.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from hvdkit.world import read_world

if __name__ == "__main__":
    function, folder, arguments = sys.argv[1:]
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(folder, f"{read_world().rank}.json").write_text(json.dumps(result))
