"""Start of --wrap in a rank: hvdkit.startup imports this module before the script's first framework.

It patches PyTorch and Keras right after the script has imported them. Without HVDKIT_WRAP the import does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields

from hvdkit.config import read_environment, read_package_config
from hvdkit.log import logger
from hvdkit.setting import find_misspelt, parse_bool
from hvdkit.world import read_world
from hvdkit_wrap.settings import WrapSettings


def start() -> None:
    """Prepare this rank: silence its output, select its GPU, and register the patches of frameworks."""
    from hvdkit.startup.after_import import after_import
    from hvdkit_wrap import environment, frameworks, quiet, seeds
    from hvdkit_wrap.session import open_session

    world = read_world()
    environment.disable_in_children()
    chosen = environment.show_one_gpu(world.local_rank)
    settings = read_package_config(WrapSettings)
    session = open_session(settings, rank=world.rank, size=world.size)
    if session.first:
        _warn_of_misspelt(read_environment())
    if chosen is not None:
        session.report.say("ranks", "each rank sees only its own GPU, as cuda:0")
    seeds.seed_alike(settings.seed)
    quiet.silence_other_ranks(world.rank)
    sys.meta_path.insert(0, frameworks.RefuseHorovod())
    for name, act in frameworks.ACTS.items():
        after_import(name, act)
    frameworks.watch_the_end()


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Warn of variables HVDKIT_WRAP_... that are no settings but resemble one."""
    names = [WrapSettings.name_of(field.name) for field in fields(WrapSettings)]
    own = [name for name in environ if name.startswith("HVDKIT_WRAP_")]
    for variable, setting in find_misspelt(own, names).items():
        logger.warning("%s is not a setting of hvdkit-wrap and is ignored. Did you mean %s?", variable, setting)


if parse_bool(read_environment().get("HVDKIT_WRAP", "")):
    start()
