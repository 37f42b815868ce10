"""Which engine: hvdkit's own, or Horovod's core."""

from __future__ import annotations

from collections.abc import Sequence


def choose_engine(wish: str, launcher: str, built: Sequence[str], framework: str) -> tuple[str, str]:
    """The engine, "native" or "horovod", and why, in words.

    wish: the setting `engine`. launcher: see World. built: frameworks that Horovod is built for here. framework: the
    script's; "" for one that Horovod has no binding for.
    """
    if wish != "auto":
        return wish, f"asked for (engine={wish})"
    if launcher != "horovodrun":
        return "native", "hvdkit's own, wherever ranks were not started by horovodrun with Gloo"
    if built and (not framework or framework in built):
        return "horovod", "horovodrun started the ranks with Gloo, which Horovod's core knows best"
    return "native", f"horovodrun started the ranks, and Horovod has no binding for {framework or 'any framework'} here"
