"""What ranks do in the tests of faults: small allreduces, until something happens to the last rank.

loop.py [exit | abort | raise | deaf | done | talk | until FILE]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

from hvdkit.config import read_config
from hvdkit.engine.startup import open_world
from hvdkit.transport.buffer import as_buffer
from hvdkit.transport.mpi.library import abort

what = sys.argv[1] if len(sys.argv) > 1 else ""
world, transport, _ = open_world(read_config())
if what == "deaf":  # and so is what it starts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(["sleep", "300"])
print(f"runs as {os.getpid()}", flush=True)
for step in range(2000):
    number = np.ones(1, dtype=np.float32)
    if what == "until":
        number += os.path.exists(sys.argv[2])
    transport.allreduce(as_buffer(number))
    if what == "until" and number[0] > world.size:
        break
    assert number[0] == world.size
    time.sleep(0.03)
    if what == "talk":
        print("x" * 200_000, flush=True)
    if step == 20 and world.rank == world.size - 1:
        if what == "exit":
            os._exit(3)
        if what == "abort":
            abort(7)
        if what == "raise":
            raise ValueError("no such batch")
    if (what == "done" and step == 40) or (what == "talk" and step == 60):
        break
