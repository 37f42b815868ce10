"""Run scripts that know nothing of hvdkit one after another on the ranks that `hvdrun --wrap` has started.

python plain_scripts.py SCRIPT...: after what a script prints comes a line with its name.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path

MARK = "=== "


def main(*scripts: str) -> None:
    """Run them."""
    for script in scripts:
        sys.argv = [script]
        left = runpy.run_path(script, run_name="__main__")
        del left
        gc.collect()  # optimizers are dropped on all ranks at the same point, also those in cycles
        print(f"{MARK}{Path(script).name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
