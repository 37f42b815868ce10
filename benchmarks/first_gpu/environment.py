"""The facts of this machine that matter for a GPU, as JSON: `python -m benchmarks.first_gpu.environment FILE`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hvdkit.tools.bench.report import describe_machine

_LIMIT_S = 40
_QUERY = "index,name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,mig.mode.current"


def main() -> None:
    """Write the facts."""
    facts: dict[str, str] = {
        **describe_machine(),
        "GPUs": _call("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"),
        "topology": _call("nvidia-smi", "topo", "-m"),
        "hvdkit doctor": _call(sys.executable, "-m", "hvdkit", "doctor"),
        **_describe_torch(),
    }
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=1))


def _call(*command: str) -> str:
    """The output of a program, or why it has none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def _describe_torch() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:
        return {"torch": str(error)}
    facts = {"torch, CUDA": str(torch.version.cuda), "torch, ROCm": str(torch.version.hip)}
    if torch.cuda.is_available():
        facts["torch, NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["torch, GPU"] = str(torch.cuda.get_device_properties(0))
    return facts


if __name__ == "__main__":
    main()
