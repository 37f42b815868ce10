"""A rank of Horovod that runs calls for a rank of hvdkit; started by horovod_job.py, not by hand."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import horovod.torch as horovod
from horovod.common.exceptions import HorovodInternalError


def serve(directory: str) -> None:
    """Run the calls that arrive through this rank's socket in `directory`, until None arrives."""
    horovod.init()
    with Client(str(Path(directory, str(horovod.rank())))) as connection:
        connection.send(os.getpid())
        while (task := connection.recv()) is not None:
            function, arguments = task
            module, _, name = function.partition(":")
            connection.send(_call(getattr(importlib.import_module(module), name), arguments))
    horovod.shutdown()


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str]:
    """Call the function; returns its result and the text of its error."""
    try:
        return function(*arguments), ""
    except (HorovodInternalError, RuntimeError, ValueError, TypeError) as error:
        return None, str(error) or type(error).__name__


if __name__ == "__main__":
    serve(sys.argv[1])
