"""Folders that all ranks make at the same moment."""

from __future__ import annotations

import os
import time
from typing import Any

from hvdkit.wrap.session import active

_SLACK_S = 60.0  # ranks start within this time, and clocks of file servers differ


def share_folders() -> None:
    """os.mkdir, and all that is made of it, finds a folder of another rank of this job in order.

    One that was there before the job is an error as ever.
    """
    plain = os.mkdir
    began = time.time()

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(path, *args, **kwargs)
        except FileExistsError:
            if not active() or not os.path.isdir(path) or os.stat(path).st_ctime < began - _SLACK_S:
                raise

    os.mkdir = mkdir
