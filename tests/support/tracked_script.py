"""A script that tracks, and ends as its argument says; without ranks."""

from __future__ import annotations

import os
import signal
import sys

import fake_mlflow

from hvdkit.hook import install_exception_hook
from hvdkit.tracking.output import Output
from hvdkit.tracking.targets import Targets

fake_mlflow.install()
output = Output(Targets(mlflow="uri"), None)
output.open()
how = sys.argv[1]
if how == "sys.exit":
    sys.exit(3)
if how == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
elif how == "hvdkit's hook":
    install_exception_hook(0, "here", None)
if how == "KeyboardInterrupt":
    raise KeyboardInterrupt
if how != "end":
    raise ValueError(how)
