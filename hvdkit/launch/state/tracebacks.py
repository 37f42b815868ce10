"""Show equal tracebacks of several ranks once: an error of the script usually occurs on all ranks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from hvdkit.launch.hostfiles.names import fold

_HOLD_S = 0.3  # ranks with the same error print it at about the same time
_LARGEST = 1 << 20
_BEGINNING = re.compile(rb"^.*(?:Traceback \(most recent call last\):|hvdkit: rank \S+ .*failed with )", re.MULTILINE)
# The rank, in the first line of hvdkit's tracebacks and in every line of torch.distributed's hook.
_RANK = re.compile(rb"(?<=hvdkit: )rank \d+ on \S+|^\[rank\d+\]", re.MULTILINE)


class Tracebacks:
    """Relays output; from a traceback on, holds a rank's stderr for a moment, to compare it with that of other ranks.

    write: takes (rank, is it stderr, data). prefix_of: see Output.
    """

    def __init__(self, write: Callable[[int, bool, bytes], None], prefix_of: Callable[[int], bytes]) -> None:
        self._write, self._prefix_of = write, prefix_of
        self._held: dict[int, bytes] = {}

    def pass_on(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Write some of a rank's output, or hold it."""
        if is_stderr and rank not in self._held and self._prefix_of(rank) and (found := _BEGINNING.search(data)):
            if not self._held:
                asyncio.get_running_loop().call_later(_HOLD_S, self.flush)
            self._held[rank] = b""
            if found.start():
                self._write(rank, True, data[: found.start()])
            data = data[found.start() :]
        if not is_stderr or rank not in self._held:
            self._write(rank, is_stderr, data)
            return
        self._held[rank] += data
        if len(self._held[rank]) > _LARGEST:
            self.flush()

    def flush(self) -> None:
        """Write the held output."""
        held, self._held = self._held, {}
        equal: dict[bytes, list[int]] = {}
        for rank, text in held.items():  # in the order of arrival
            equal.setdefault(_RANK.sub(b"", self._strip(rank, text)), []).append(rank)
        for ranks in equal.values():
            text = held[ranks[0]]
            if len(ranks) > 1:
                for rank in ranks:
                    if not held[rank].startswith(self._prefix_of(rank)):  # it continues a line that the rank left open
                        self._write(rank, True, b"\n")
                who = fold(map(str, sorted(ranks))).strip("[]")
                text = _RANK.sub(f"ranks {who}".encode(), self._strip(ranks[0], text))
                text = re.sub(rb"^(?=.)", f"[{who}] ".encode(), text, flags=re.MULTILINE)
            self._write(ranks[0], True, text)

    def _strip(self, rank: int, text: bytes) -> bytes:
        return re.sub(rb"^" + re.escape(self._prefix_of(rank)), b"", text, flags=re.MULTILINE)
