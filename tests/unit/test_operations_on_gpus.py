"""Named operations on GPUs belong to one adapter of a process."""

from __future__ import annotations

from typing import Any

import pytest

from hvdkit.engine.named import execution
from hvdkit.errors import HorovodInternalError


def _open(_: Any) -> Any:
    return None


def test_a_second_adapter_is_refused_and_without_one_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_openers", [])
    with pytest.raises(HorovodInternalError, match="Import the same framework's adapter on every rank"):
        execution.open_devices(None)  # type: ignore[arg-type]
    execution.on_device(_open)
    with pytest.raises(RuntimeError, match=r"are done by .*_open.* already"):
        execution.on_device(_open)
    assert execution.open_devices(None) is None  # type: ignore[arg-type]
