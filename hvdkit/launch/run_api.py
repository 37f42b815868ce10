"""`hvdkit.run(function, np=2)`: a function as a job, from Python; Horovod's `horovod.run`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.errors import HorovodInternalError, LaunchError
from hvdkit.launch.function_outcome import FunctionOutcome
from hvdkit.launch.job.runtime_dir import RuntimeDirectory
from hvdkit.optional_import import optional_import

FUNCTION = "function.pickle"

_ELASTIC = "min_num_proc max_num_proc slots reset_limit cooldown_range host_discovery_script min_np max_np".split()
_FLAGS = {
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "mpi_args": "--mpi-args",
    "network_interface": "--network-interfaces",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    verbose: int | None = None,
    executable: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call func(*args, **kwargs) on every rank of a new job and return what each rank returned, by rank.

    func and what it returns are pickled with cloudpickle, so a function of the script itself will do.
    num_proc, np: ranks. hosts, hostfile: as for hvdrun; neither for this machine. Function and results travel in a
    folder that is made here in /tmp, or, for several hosts, in the working directory, which all of them have to see.
    executable: the Python of the ranks. options: start_timeout, ssh_port, ssh_identity_file, output_filename, mpi_args,
    network_interfaces, as Horovod's. use_gloo, use_mpi: accepted, how ranks talk is hvdkit's choice.
    The job ends if this process is killed (on Linux).
    Raises what func raised on the rank that failed first, from a HorovodInternalError with the rank, its host and its
    traceback. An exception that cannot be pickled or unpickled becomes a RuntimeError with its type and text. Raises
    LaunchError for what cannot be started, HorovodInternalError if the job fails otherwise.
    """
    if not callable(func):
        raise TypeError(f"run() needs a function, not {type(func).__name__}: run(train, args=(3,)), not run(train(3)).")
    if hosts is not None and hostfile is not None:
        raise LaunchError("run() was given hosts and hostfile. Leave one of them out.")
    if use_gloo and use_mpi:
        raise LaunchError("run() was given use_gloo and use_mpi. Leave one of them out.")
    ranks = np if np is not None else num_proc
    flags = plan_flags({"hosts": hosts, "hostfile": hostfile, **options})
    pickler = optional_import("cloudpickle", "run")
    here = hosts is None and hostfile is None
    with (
        RuntimeDirectory("run")
        if here
        else tempfile.TemporaryDirectory(prefix="hvdkit-run-", dir=os.getcwd()) as folder
    ):
        Path(folder, FUNCTION).write_bytes(pickler.dumps((func, tuple(args), dict(kwargs or {}), list(sys.path))))
        hvdrun = [sys.executable, "-m", "hvdkit.launch.run_launcher", str(os.getpid())]
        start = [*hvdrun, "-np", str(ranks), *flags, *(["--verbose"] if verbose else [])]
        rank = [executable or sys.executable, "-m", "hvdkit.launch.run_worker", folder]
        status = _wait_for(subprocess.Popen([*start, *rank], stdin=subprocess.DEVNULL))
        return give_results(_read_results(Path(folder), ranks), ranks, status, folder)


def _wait_for(hvdrun: subprocess.Popen[bytes]) -> int:
    """Wait until hvdrun has ended the job, also after Ctrl-C, which is then raised; the next one kills hvdrun."""
    with hvdrun:
        try:
            try:
                return hvdrun.wait()
            except KeyboardInterrupt:
                hvdrun.send_signal(signal.SIGINT)  # the terminal has sent it too, unless only this process got it
                hvdrun.wait()
                raise
        except BaseException:
            hvdrun.kill()
            raise


def plan_flags(options: Mapping[str, Any]) -> list[str]:
    """hvdrun's flags for Horovod's options. Raises LaunchError for those that hvdkit has not."""
    given = {name: value for name, value in options.items() if value is not None}
    elastic = [name for name in _ELASTIC if given.pop(name, None) is not None]
    if elastic:
        raise LaunchError(
            f"run({elastic[0]}=...): an elastic job cannot be started from Python. Start the script with: "
            "hvdrun --min-np N python train.py"
        )
    given.pop("disable_cache", None)
    interfaces = given.pop("network_interfaces", None)
    if interfaces:
        given["network_interface"] = ",".join(interfaces)
    unknown = [name for name in given if name not in _FLAGS]
    if unknown:
        raise LaunchError(f"run({unknown[0]}=...): there is no such option. It takes {', '.join(sorted(_FLAGS))}.")
    alias = ["--alias-horovod"] if "hvdkit.alias_horovod" in sys.modules else []
    return [*(f"{_FLAGS[name]}={value}" for name, value in given.items()), *alias]


def result_name(rank: int) -> str:
    """The file of a rank's result."""
    return f"result.{rank}.pickle"


class Result(NamedTuple):
    """What a rank has left. seconds: when, by the clock of its host. outcome: a FunctionOutcome, pickled."""

    rank: int
    host: str
    seconds: float
    raised: bool
    outcome: bytes

    def get(self) -> Any:
        """Return what the function returned. Raises what it raised."""
        where = f"rank {self.rank} on {self.host}"
        try:
            outcome: FunctionOutcome = pickle.loads(self.outcome)
        except Exception as error:  # whatever the class of the value does
            raise HorovodInternalError(
                f"What {where} returned cannot be unpickled here: {type(error).__name__}: {error}. Its class must be "
                "importable here."
            ) from error
        return outcome.get(where)

    @property
    def is_internal(self) -> bool:
        """Has the function raised HorovodInternalError?"""
        return self.raised and bool(pickle.loads(self.outcome).internal)


def _read_results(folder: Path, ranks: int) -> list[Result]:
    files = [folder / result_name(rank) for rank in range(ranks)]
    return [pickle.loads(file.read_bytes()) for file in files if file.exists()]


def give_results(results: Sequence[Result], ranks: int, status: int, folder: object) -> list[Any]:
    """Return what each rank returned, by rank.

    results: of the ranks that have left one. status: exit code of hvdrun. folder: of the results. Raises as run().
    """
    failed = sorted((result for result in results if result.raised), key=lambda result: result.seconds)
    # Ranks that have waited for the one that failed raise HorovodInternalError, perhaps before it has come to its end.
    for result in sorted(failed, key=lambda result: result.is_internal):
        result.get()
    if status:
        raise HorovodInternalError(f"The job of run() ended with exit code {status}; its output says why.")
    missing = sorted(set(range(ranks)) - {result.rank for result in results})
    if missing:
        raise HorovodInternalError(
            f"Rank {missing[0]} left no result in {folder}. Call run() in a directory that all hosts of the job see."
        )
    return [result.get() for result in results]
