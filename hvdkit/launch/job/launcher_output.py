"""What the launcher itself prints, beside the ranks' output, which agents bring."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from hvdkit.launch.job.output import Output

_HELD_S = 1.0
# On a busy machine the ssh that mpirun has started can be faster than mpirun.
_HARMLESS = re.compile(rb"^\[\S+\] plm:ssh: Warning: setpgid\(.*\n", re.MULTILINE)


class LauncherOutput:
    """Shown after a moment, unless it turns out to be about the end of a rank, which hvdrun reports better.

    at_once: show it as it comes. wanted: whether it is to be shown after that moment.
    """

    def __init__(self, output: Output, *, at_once: bool, wanted: Callable[[], bool]) -> None:
        self._output, self._at_once, self._wanted = output, at_once, wanted
        self._held = bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read to the end."""
        while data := await stream.read(1 << 16):
            self._held += data
            if self._at_once:
                self.show()
            else:
                asyncio.get_running_loop().call_later(_HELD_S, self._show_if_wanted)

    def show(self) -> None:
        """Show what has come and was not shown."""
        self._output.repeat(_HARMLESS.sub(b"", self._held))
        self._held.clear()

    def _show_if_wanted(self) -> None:
        if self._wanted():
            self.show()
