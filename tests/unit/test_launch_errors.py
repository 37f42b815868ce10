"""Every LaunchError of hvdrun has a code; tests/data/launch_errors.txt lists the codes with their messages."""

from __future__ import annotations

import ast
import os
import pickle
import re
from pathlib import Path

import pytest

from hvdkit.errors import HostfileError, LaunchError
from hvdkit.launch.options import LaunchOptions

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/data/launch_errors.txt"


def find_errors() -> list[tuple[str, str, str]]:
    """(code, message as the source has it, where) of each LaunchError that hvdkit/launch raises."""
    found = []
    for path in sorted((ROOT / "hvdkit/launch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LaunchError" and node.args:
                codes = [ast.literal_eval(word.value) for word in node.keywords if _is_code(word)]
                inherits = any(word.arg == "code" and not _is_code(word) for word in node.keywords)
                if not inherits:
                    found.append((codes[0] if codes else "", _sample(node.args[0]), f"{path.name}:{node.lineno}"))
    return found


def _is_code(word: ast.keyword) -> bool:
    return word.arg == "code" and isinstance(word.value, ast.Constant)


def _sample(message: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(_sample(part) for part in message.values)
    if isinstance(message, ast.FormattedValue):
        return "{" + ast.unparse(message.value) + "}"
    if isinstance(message, ast.BinOp):
        return _sample(message.left) + _sample(message.right)
    return "{" + ast.unparse(message) + "}"


def test_every_error_has_a_code() -> None:
    assert not [where for code, _, where in find_errors() if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)]


def test_the_codes_are_those_of_the_record() -> None:
    samples: dict[str, str] = {}
    for code, message, _ in find_errors():
        samples[code] = max(samples.get(code, ""), " ".join(message.split()), key=lambda text: (len(text), text))
    text = "".join(f"{code}\n    {samples[code]}\n" for code in sorted(samples))
    if os.environ.get("HVDKIT_TEST_RECORD"):
        RECORD.write_text(text)
    assert text == RECORD.read_text(), "if this is intended: HVDKIT_TEST_RECORD=1 pytest " + str(Path(__file__).name)


def test_a_code_is_kept_when_the_error_is_pickled() -> None:
    with pytest.raises(LaunchError) as caught:
        LaunchOptions(np="many")
    assert caught.value.code == "np-invalid"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.code) == (str(caught.value), "np-invalid")
    assert HostfileError("hosts", ["1: x"]).code == "hostfile-invalid"
    assert LaunchError("of a package").code == ""
