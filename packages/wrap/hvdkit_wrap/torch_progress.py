"""The progress of the training, in epochs of the loader that is iterated for it."""

from __future__ import annotations

_epochs: dict[int, int] = {}
_last: tuple[int, float] | None = None  # (loader, finished fraction of its epoch)


def began(loader: int) -> None:
    """Record the beginning of an epoch."""
    global _last
    _last = (loader, 0.0)
    _epochs.setdefault(loader, 0)


def gave(loader: int, batch: int, batches: int | None) -> None:
    """Record that a loader gives batch number `batch` of `batches`; batches is None if their number is unknown."""
    global _last
    _last = (loader, min(batch / batches, 1.0) if batches else 0.0)


def ended(loader: int) -> None:
    """Record the end of an epoch."""
    global _last
    _epochs[loader] = _epochs.get(loader, 0) + 1
    _last = (loader, 0.0)


def begun() -> bool:
    """Has any loader been iterated for training?"""
    return _last is not None


def epoch() -> float:
    """Return the number of epochs done; 2.5 is half way through the third epoch."""
    if _last is None:
        return 0.0
    loader, part = _last
    return _epochs.get(loader, 0) + part
