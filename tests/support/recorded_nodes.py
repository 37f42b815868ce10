"""Nodes with GPUs, from tests/data/gpus: their files of /sys and /proc in a folder, and their CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdkit.gpu_vendors import Folders
from hvdkit.launch.agent.host_info import Cpu, parse_cpus

DATA = Path(__file__).parents[1] / "data" / "gpus"


def read_node(name: str) -> dict[str, Any]:
    node: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return node


def plant_node(name: str, root: Path) -> Folders:
    """Write the files of a node below a folder."""
    for path, text in read_node(name)["files"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return Folders.under(root)


def list_cpus(name: str) -> tuple[Cpu, ...]:
    """The CPUs of a node, as read_topology() lists them."""
    node = read_node(name)
    numa = {number: at for at, text in enumerate(node["numa"]) for number in parse_cpus(text)}
    return tuple(Cpu(number, number % node["cores"], numa[number]) for number in sorted(numa))
