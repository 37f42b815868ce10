"""How long ranks that can be outlived are waited for: one that neither works nor ends is in the others' way."""

from __future__ import annotations

import signal

from hvdkit.launch.ranks import Ranks


def find_hanging(ranks: Ranks, now: float, patience_s: float) -> dict[int, str]:
    """Tell which ranks are to be killed, so that the others can go on, and why.

    now: by time.monotonic(). patience_s: how long a rank may be stopped, and how long others may wait for it to go on
    with them when the ranks have changed; 0 for ever.
    """
    if patience_s <= 0:
        return {}
    found = {}
    waiting = [since for rank, since in ranks.changing.items() if rank in ranks.expected]
    there = ranks.ready & ranks.expected
    if waiting and now - min(waiting) > patience_s:
        for rank in there - ranks.changing.keys():
            found[rank] = f"the others have waited {patience_s:g} s for it, to go on together"
    if waiting and now - max(waiting) > patience_s and there <= ranks.changing.keys():
        for rank in there:  # MPI has not told one of them of an end
            found[rank] = f"the ranks that are left have not come together within {patience_s:g} s"
    for rank, since in ranks.stopped.items():
        if rank in ranks.expected and now - since > patience_s:
            found[rank] = f"it has been stopped by {signal.Signals(ranks.paused[rank]).name} for {patience_s:g} s"
    return found
