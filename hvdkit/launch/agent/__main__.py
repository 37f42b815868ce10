"""`python -I -S .../hvdkit/launch/agent -- command`: run the command as a rank."""

import importlib
import os
import sys

# Run by path, this folder is no package yet. Its parents become packages, but their code does not run, so that only
# this folder and, of hvdkit, handshake.py, ranges.py, visible_gpus.py and gpu_vendors.py are imported.
folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for name, path in (("hvdkit", os.path.dirname(folder)), ("hvdkit.launch", folder)):
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__path__ = [path]

sys.exit(importlib.import_module("hvdkit.launch.agent.main").main(sys.argv[1:]))
