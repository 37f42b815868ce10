"""`python -I -S .../hvdkit/launch/agent -- command`: run the command as a rank."""

import importlib
import os
import sys

# Run by path, this folder is no package yet. Make it the package `agent`: that way hvdkit itself is not imported.
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

sys.exit(importlib.import_module("agent.main").main(sys.argv[1:]))
