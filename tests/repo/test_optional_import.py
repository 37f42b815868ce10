from __future__ import annotations

import json
import re
from configparser import ConfigParser
from pathlib import Path

import pytest

from hvdkit.errors import MissingDependencyError
from hvdkit.optional_import import optional_import


def test_an_installed_package_is_imported() -> None:
    assert optional_import("json", "anything") is json


def test_a_missing_package_tells_how_to_install_it() -> None:
    with pytest.raises(MissingDependencyError, match=r"'no_such_package.part'.*pip install 'hvdkit\[torch\]'") as error:
        optional_import("no_such_package.part", "torch")
    assert isinstance(error.value, ImportError)


def test_a_broken_package_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library") as error:
        optional_import("broken_package", "torch")
    assert not isinstance(error.value, MissingDependencyError)


def test_every_extra_that_a_message_names_is_there_and_small() -> None:
    root = Path(__file__).parents[2]
    setup = ConfigParser()
    setup.read(root / "setup.cfg")
    extras = setup["options.extras_require"]
    found = set()
    for path in (root / "hvdkit").rglob("*.py"):
        found |= set(re.findall(r"hvdkit\[(\w+)\]|\boptional_import\(\"\w+\", \"(\w+)\"\)", path.read_text()))
    names = {one or other for one, other in found}
    assert {"config", "run"} <= names <= set(extras)
    assert extras["config"].split() == ["pyyaml"]
    assert extras["run"].split() == ["cloudpickle"]
