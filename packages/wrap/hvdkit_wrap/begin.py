"""Start of --wrap in a rank: hvdkit.startup imports this module before the script's first framework.

It patches PyTorch and Keras right after the script has imported them. Without HVDKIT_WRAP the import does nothing.
"""

from __future__ import annotations

import sys

from hvdkit.config import read_config, read_environment
from hvdkit.setting import parse_bool
from hvdkit.world import read_world


def start() -> None:
    """Prepare this rank: silence its output, select its GPU, and register the patches of frameworks."""
    from hvdkit.startup.after_import import after_import
    from hvdkit_wrap import environment, frameworks, quiet, seeds
    from hvdkit_wrap.session import open_session

    world = read_world()
    environment.keep_from_children()
    chosen = environment.show_one_gpu(world.local_rank)
    config = read_config()
    session = open_session(config, rank=world.rank, size=world.size)
    if chosen is not None:
        session.report.say("ranks", "each rank sees only its own GPU, as cuda:0")
    seeds.seed_alike(config.wrap_seed)
    quiet.hush(world.rank)
    sys.meta_path.insert(0, frameworks.RefuseHorovod())
    for name, act in frameworks.ACTS.items():
        after_import(name, act)
    frameworks.watch_the_end()


if parse_bool(read_environment().get("HVDKIT_WRAP", "")):
    start()
