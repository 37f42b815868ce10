"""`python -m hvdkit.launch.run_launcher PID ARGUMENTS`: hvdrun for hvdkit.run(), whose job ends if process PID dies."""

import signal
import sys

from hvdkit.launch.agent.session_reaper import die_with_parent
from hvdkit.launch.cli.hvdrun import main

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGHUP)()
    sys.exit(main(sys.argv[2:]))
