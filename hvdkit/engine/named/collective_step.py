"""Steps that all ranks do together, as named operations: nobody begins one before everyone has come to it.

What goes through here is seen by the stall report, fails on every rank when one has left or calls something else, and
comes in one order on all ranks, whatever other operations are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.engine.api import Engine
from hvdkit.engine.named.operation import Action, Announcement
from hvdkit.engine.naming import STEP


def collective_step(
    engine: Engine, kind: str, action: Action | None, *, name: str = "", options: Sequence[tuple[str, str]] = ()
) -> Any:
    """Wait until every rank has come to this step, do it, and return what `action` returns, if there is one.

    kind: what the step is, in a word that users know. name: of the step; without one it is the n-th of all such steps,
    so that ranks which come to different ones are told. options: what all ranks must say alike, as (word, value).
    Raises HorovodInternalError if the ranks disagree or one has left, and what `action` raises on all ranks alike.
    """
    named = f"{kind}.{name}" if name else f"{STEP}.{engine.count(STEP)}"
    return engine.do(named, Announcement(kind, (), tuple(options)), (), action=action).outcome
