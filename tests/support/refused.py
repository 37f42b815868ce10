"""A LaunchError is asserted by its code; its sentence is in tests/data/launch_errors.txt only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from hvdkit.errors import LaunchError


@contextmanager
def refused(
    code: str, *, names: Sequence[str] = (), kind: type[LaunchError] = LaunchError
) -> Iterator[pytest.ExceptionInfo[LaunchError]]:
    """Expect a LaunchError in the body.

    code: its code.
    names: what its message must name: hosts, numbers, options, a file and its line.
    kind: its class, or a base of it.
    """
    assert not isinstance(names, str), "names is a list or a tuple"
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert caught.value.code == code, f"{caught.value.code}: {message}"
    missing = [name for name in names if name not in message]
    assert not missing, f"{missing} not in: {message}"
