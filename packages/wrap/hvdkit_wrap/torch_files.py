"""Run torch.save on rank 0 only; a rank that loads the file waits until rank 0 has written it."""

from __future__ import annotations

import os
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit_wrap.session import active, current

_saved: set[str] = set()


def watch() -> None:
    """Patch torch.save and torch.load for paths; calls with an open file or a buffer are unchanged."""
    save, load = torch.save, torch.load

    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if active() and isinstance(f, (str, os.PathLike)):
            _saved.add(_key(f))
            if not current().first:
                return
        save(obj, f, *args, **kwargs)

    def loading(f: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and isinstance(f, (str, os.PathLike)) and _key(f) in _saved and hvd.is_initialized():
            hvd.barrier()  # rank 0 enters the barrier only after it has written the file
        return load(f, *args, **kwargs)

    torch.save, torch.load = saving, loading
    _share_folders()


def _key(path: Any) -> str:
    return str(os.path.abspath(os.fspath(path)))


def _share_folders() -> None:
    """Accept a folder that another rank has just created."""
    from hvdkit_wrap.folders import share_folders

    share_folders()
