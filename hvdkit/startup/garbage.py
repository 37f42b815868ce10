"""Keep Python's garbage collector from looking at a framework's objects again and again.

A full collection looks at every container object of the process: with PyTorch imported some 170,000 of them, for 80 ms,
in which this rank does nothing and the others wait for it. It comes as soon as new objects are a quarter of the old
ones, however many operations or batches that takes. Modules, classes and functions are never garbage, so they are moved
to the collector's permanent generation, and a full collection takes as long as the training's own objects need.
"""

from __future__ import annotations

import gc


def freeze_objects() -> bool:
    """Leave the objects that are there now out of garbage collections, from the first call in a process on.

    Garbage is collected before. An object that is frozen is freed with its last reference, as ever; one that is in a
    cycle of references later stays until gc.unfreeze(). Returns False if objects are frozen already, by whomever.
    """
    if gc.get_freeze_count() or not gc.isenabled():
        return False
    gc.collect()
    gc.freeze()
    return True
