"""A rank of Horovod that does what a rank of hvdkit asks for; started by horovod_job.py, not by hand."""

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
    """Call what comes through the socket in `directory` that has this rank's number, until None comes."""
    horovod.init()
    with Client(str(Path(directory, str(horovod.rank())))) as connection:
        connection.send(os.getpid())
        while (task := connection.recv()) is not None:
            function, arguments = task
            module, _, name = function.partition(":")
            connection.send(_call(getattr(importlib.import_module(module), name), arguments))
    horovod.shutdown()


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str]:
    """What it returns, and what went wrong."""
    try:
        return function(*arguments), ""
    except (HorovodInternalError, RuntimeError, ValueError, TypeError) as error:
        return None, str(error) or type(error).__name__


if __name__ == "__main__":
    serve(sys.argv[1])
