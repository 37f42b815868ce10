from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from hvdkit.engine import provider
from hvdkit.errors import MissingDependencyError


@pytest.mark.parametrize("wish", ["horovod", "auto"])
@pytest.mark.parametrize(
    ("value", "why"),
    [("not_there:Provider", "ModuleNotFoundError"), ("os:sep", "TypeError"), ("os:no", "AttributeError")],
)
def test_an_engine_whose_package_cannot_be_loaded_is_named(
    wish: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(**_: Any) -> EntryPoints:
        return EntryPoints([EntryPoint("horovod", value, provider.ENTRY_POINTS)])

    monkeypatch.setattr(provider, "entry_points", find)
    with pytest.raises(MissingDependencyError, match=f"{value}, which has the engine horovod, .*{why}.*ENGINE=native"):
        provider.find_provider(wish, "horovodrun", "torch", lambda: pytest.fail("is not asked"))
