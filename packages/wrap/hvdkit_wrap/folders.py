"""Let all ranks create the same folder at the same time."""

from __future__ import annotations

import os
import time
from typing import Any

from hvdkit_wrap.session import active

_SLACK_S = 60.0  # ranks start within this time, and clocks of file servers differ


def share_folders() -> None:
    """Make os.mkdir, and functions that call it, accept a folder that another rank of this job has created.

    A folder that is older than the job remains an error.
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
