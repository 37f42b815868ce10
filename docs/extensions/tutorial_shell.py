"""How a tutorial's `!command` runs while the site is built; its kernel reads this file first (PYTHONSTARTUP).

The output is printed, as in a terminal, and kept in `outputs` for a check. A command that fails, fails the build.
"""

from __future__ import annotations

import subprocess

from IPython import get_ipython

outputs: list[str] = []


def _run(command: str) -> None:
    ended = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, end="")
    if ended.returncode:
        raise RuntimeError(f"{command} ended with exit code {ended.returncode}.")
    outputs.append(ended.stdout)


get_ipython().system = _run
