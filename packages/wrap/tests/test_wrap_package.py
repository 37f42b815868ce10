"""hvdrun --wrap with and without the package hvdkit-wrap."""

from __future__ import annotations

import pytest

from hvdkit import startup
from hvdkit.launch.cli import hvdrun


def test_hvdrun_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(startup, "find_entry_points", lambda group: {})
    assert hvdrun.main(["-np", "3", "--wrap", "true"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("hvdrun: --wrap is in the package hvdkit-wrap, which is not installed in this Python, ")
    assert err.endswith("Run, in a clone of hvdkit: pip install -c constraints.txt ./packages/wrap\n")
