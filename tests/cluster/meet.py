"""What ranks do in the tests of launchers: say who they are, and add up an array.  meet.py [ELEMENTS]"""

from __future__ import annotations

import sys

import numpy as np

from hvdkit.config import read_config
from hvdkit.engine.startup import open_world
from hvdkit.transport.buffer import as_buffer

world, transport, _ = open_world(read_config())
numbers = np.full(int(sys.argv[1]) if len(sys.argv) > 1 else 10, world.rank + 1, dtype=np.float32)
transport.allreduce(as_buffer(numbers))
assert (numbers == world.size * (world.size + 1) / 2).all()
print(f"rank {world.rank} of {world.size} on {world.host}, {world.local_rank} of {world.local_size} there", flush=True)
transport.close()
