"""`python -m hvdkit.launch.run_launcher PID FOLDER`: hvdrun for hvdkit.launch(), whose job ends if process PID dies."""

import pickle
import signal
import sys
from pathlib import Path

from hvdkit.config import read_environment
from hvdkit.errors import LaunchError
from hvdkit.launch.agent.session_reaper import die_with_parent
from hvdkit.launch.cli.console import run_command
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.run_api import OPTIONS, REFUSAL
from hvdkit.launch.start import run_options


def main(folder: Path) -> int:
    """Run the job whose options are in a folder; returns the exit code. A LaunchError is written into the folder."""
    options: LaunchOptions = pickle.loads((folder / OPTIONS).read_bytes())
    try:
        return run_options(options, read_environment())
    except LaunchError as error:
        refusal = error if type(error) is LaunchError else LaunchError(str(error), code=error.code)
        (folder / REFUSAL).write_bytes(pickle.dumps(refusal))
        return 2


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGHUP)()
    sys.exit(run_command("hvdrun", lambda: main(Path(sys.argv[2]))))
