"""examples/kubernetes/Dockerfile, which CI does not build: what it copies is there, and has what the manifests name."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
KINDS = {"mpijob": "root", "trainjob": "mpiuser"}


def read_instructions() -> Iterator[tuple[str, list[str]]]:
    """The instructions of the Dockerfile, each with its words."""
    text = re.sub(r"^#.*\n", "", (EXAMPLES / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        yield name, shlex.split(rest)


def read_copies() -> dict[str, Path]:
    """What COPY copies: by path in the image, the file or folder of this checkout."""
    copies = {}
    for name, words in read_instructions():
        if name == "COPY":
            *sources, target = words
            copies.update({target + source if target.endswith("/") else target: ROOT / source for source in sources})
    return copies


def find_source(path: str) -> Path | None:
    """The file of this checkout that has this path in the image; None for one that is not copied."""
    for target, source in read_copies().items():
        if path == target or path.startswith(target + "/"):
            return source / path.removeprefix(target).lstrip("/") if path != target else source
    return None


def read_strings(kind: str) -> set[str]:
    """All strings of an example's manifest."""
    yaml = pytest.importorskip("yaml")
    return set(find_strings(list(yaml.safe_load_all((EXAMPLES / f"{kind}.yaml").read_text()))))


def find_strings(node: Any) -> Iterator[str]:
    """All strings of a manifest."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from find_strings(each)


def test_what_the_image_copies_is_there() -> None:
    copies = read_copies()
    assert len(copies) > 5
    assert [source for source in copies.values() if not source.exists()] == []


def test_the_image_installs_extras_that_exist() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    words = next(words for name, words in read_instructions() if (name, words[0]) == ("RUN", "pip"))
    package, extras = re.fullmatch(r"(.*)\[(.*)\]", words[-1]).groups()  # type: ignore[union-attr]
    assert find_source(f"{package}/setup.cfg") and set(extras.split(",")) <= set(setup["options.extras_require"])
    assert find_source(words[words.index("-c") + 1]) == ROOT / "constraints.txt"


@pytest.mark.parametrize("kind", KINDS)
def test_the_image_has_the_files_that_a_manifest_names(kind: str) -> None:
    named = [text for text in read_strings(kind) if text.startswith(("/opt/", "/home/mpiuser/.sshd"))]
    assert "/opt/hvdkit/examples/pytorch_digits.py" in named
    assert [path for path in named if not ((source := find_source(path)) and source.is_file())] == []


@pytest.mark.parametrize("kind", KINDS)
def test_sshd_uses_the_key_that_the_operator_mounts(kind: str) -> None:
    """The image has none of its own. The MPI Operator mounts it at /root/.ssh, unless the manifest says where."""
    mounted = next((text for text in read_strings(kind) if text.endswith("/.ssh")), "/root/.ssh")
    config = (EXAMPLES / f"sshd_{KINDS[kind]}.conf").read_text()
    assert re.findall(r"(?m)^HostKey (.*)$", config) == [f"{mounted}/id_rsa"]
