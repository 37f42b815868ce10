"""Every LaunchError of hvdkit has a code; tests/data/launch_errors.txt has the messages, as calls raise them."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import machine_refusals
import plan_refusals
import pytest
from refused import refused

from hvdkit.errors import HostfileError, LaunchError
from hvdkit.launch.options import LaunchOptions

ROOT = Path(__file__).parents[2]
CORE, PACKAGES = "hvdkit/**/*.py", "packages/*/hvdkit_*/**/*.py"
RECORD = ROOT / "tests/data/launch_errors.txt"
#: Code -> the test that reaches it, as the call needs the sockets and the folder of a job.
ELSEWHERE = {"launcher-not-started": "tests/jobs/test_hvdrun_ending.py"}


@cache
def find_sites(pattern: str) -> tuple[tuple[str, str, int, int], ...]:
    """(code, file, first line, last line) of each raised LaunchError in these files; "" for one without a code."""
    found = []
    for path in sorted(ROOT.glob(pattern)):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if re.search(r"(Launch|Timeout|Hostfile)Error\(", source) else ():
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in ("LaunchError", "LaunchTimeoutError", "HostfileError"):
                inherited = [each for each in node.keywords if each.arg == "code"]
                if inherited and not isinstance(inherited[0].value, ast.Constant):
                    continue  # an error that is sent on
                code = "hostfile-invalid" if name == "HostfileError" else ""
                code = ast.literal_eval(inherited[0].value) if inherited else code
                found.append((code, str(path), node.lineno, node.end_lineno or node.lineno))
    return tuple(found)


def calls() -> Iterator[tuple[str, Callable[[machine_refusals.Machine], object]]]:
    for code, plain in plan_refusals.CASES.items():
        for call in plain:
            yield code, partial(on_any_machine, call)
    for code, patched in machine_refusals.CASES.items():
        for each in patched:
            yield code, each


def on_any_machine(call: Callable[[], object], machine: machine_refusals.Machine) -> object:
    return call()


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str, int]]:
    """(code, message, file, line) of the error that each call raises, in an empty working directory of its own."""
    found = []
    for code, call in calls():
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("refusal")
            patch.chdir(folder)
            with refused(code) as caught:
                call(machine_refusals.Machine(patch))
            *_, (frame, line) = ((each.tb_frame, each.tb_lineno) for each in walk(caught.tb))
            text = (
                str(caught.value)
                .replace(str(folder), "DIRECTORY")
                .replace(sys.executable, "PYTHON")
                .replace("\0", "\\0")
            )
            found.append((code, text, inspect.getsourcefile(frame) or "", line))
    return found


def walk(trace: Any) -> Iterator[Any]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


@pytest.mark.parametrize("pattern", [CORE, PACKAGES])
def test_every_error_has_a_code(pattern: str) -> None:
    sites = find_sites(pattern)
    assert sites and not [site for site in sites if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", site[0])]


def test_every_place_that_raises_one_is_reached(refusals: list[tuple[str, str, str, int]]) -> None:
    reached = {(file, line) for _, _, file, line in refusals}
    missed = [
        f"{code} {Path(file).name}:{first}"
        for code, file, first, last in find_sites(CORE)
        if code not in ELSEWHERE and not any((file, line) in reached for line in range(first, last + 1))
    ]
    assert not missed, "add a call to tests/support/plan_refusals.py or machine_refusals.py"
    assert not ELSEWHERE.keys() & {code for code, *_ in refusals}
    assert ELSEWHERE.keys() <= {code for code, *_ in find_sites(CORE)}
    for code, file in ELSEWHERE.items():
        assert f'refused("{code}"' in (ROOT / file).read_text()


def test_the_messages_are_those_of_the_record(refusals: list[tuple[str, str, str, int]]) -> None:
    messages: dict[str, set[str]] = {}
    for code, message, *_ in refusals:
        messages.setdefault(code, set()).add("".join(f"    {line}\n" for line in message.splitlines()))
    text = "".join("\n".join((code, "".join(sorted(each)))) for code, each in sorted(messages.items()))
    if os.environ.get("HVDKIT_TEST_RECORD"):
        RECORD.write_text(text)
    assert text == RECORD.read_text(), "if this is intended: HVDKIT_TEST_RECORD=1 pytest " + str(Path(__file__).name)


def test_a_code_is_kept_when_the_error_is_pickled() -> None:
    with refused("np-invalid", names=["'many'"]) as caught:
        LaunchOptions(np="many")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.code) == (str(caught.value), "np-invalid")
    assert HostfileError("hosts", ["1: x"]).code == "hostfile-invalid"
    assert LaunchError("of a package").code == ""


def test_a_refusal_with_another_code_or_without_a_value_fails() -> None:
    with pytest.raises(AssertionError, match="np-invalid: "), refused("np-missing"):
        LaunchOptions(np="many")
    with pytest.raises(AssertionError, match="'few'"), refused("np-invalid", names=["many", "few"]):
        LaunchOptions(np="many")
    with pytest.raises(pytest.fail.Exception), refused("np-invalid"):
        LaunchOptions(np=3)
