"""elastic_world_script.py with gradients on the stand-in for a GPU; arguments: those of that script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

from gpu_world import stand_in_gpu
from stand_in import stand_in_path

from hvdkit.torch import gpu
from hvdkit.transport.nccl.groups import DeviceSettings

if __name__ == "__main__":
    script = Path(__file__).with_name("elastic_world_script.py")
    sys.argv[0] = str(script)
    settings = DeviceSettings("nccl", stand_in_path())
    with stand_in_gpu(), mock.patch.object(gpu, "device_settings", lambda _: settings):
        runpy.run_path(str(script), run_name="__main__")
