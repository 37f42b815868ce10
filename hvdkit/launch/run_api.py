"""Start a job from Python: `hvdkit.launch(LaunchOptions(np=2), function)`, and Horovod's `run(function, np=2)`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdkit.config import read_config, read_environment
from hvdkit.errors import HorovodInternalError, LaunchError
from hvdkit.launch.function_results import FUNCTION, find_last, give_results, read_results
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.state.runtime_dir import RuntimeDirectory
from hvdkit.optional_import import optional_import

#: The files of the options and of the LaunchError that hvdrun raised.
OPTIONS = "options.pickle"
REFUSAL = "refusal.pickle"

# Horovod's names of options that have other names in hvdrun.
_NAMES = {
    "network_interface": "network_interfaces",
    "min_num_proc": "min_np",
    "max_num_proc": "max_np",
    "slots": "slots_per_host",
    "cooldown_range": "blacklist_cooldown_range",
}
_TAKEN = (
    *("hosts", "hostfile", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename", "mpi_args"),
    *("network_interfaces", "min_np", "max_np", "slots_per_host", "reset_limit", "blacklist_cooldown_range"),
    *("host_discovery_script", "elastic_timeout"),
)


def launch(
    options: LaunchOptions, target: Callable[..., Any] | Sequence[str], *args: Any, **kwargs: Any
) -> list[Any] | None:
    """Run a function or a command on every rank of a new job, and wait for its end: `hvdkit.launch`.

    options: of the job.
    target: a function, or a command as a list of words.
    args, kwargs: of the function, which is called as target(*args, **kwargs).

    Returns the function's value on each rank, by rank; None for a command. For an elastic job these are the ranks at
    its end, in the order of their last numbers. Function and results are written into a folder in /tmp or, if options
    name hosts, in the working directory, which all hosts must share.
    The job ends if this process is killed (on Linux).
    Raises the function's exception on the rank that failed first, from a HorovodInternalError with the rank, its host
    and its traceback. An exception that cannot be pickled or unpickled becomes a RuntimeError with its type and text.
    Raises LaunchError for a job that cannot be started, HorovodInternalError if the job fails otherwise.
    """
    if callable(target):
        return launch_function(options, target, args, kwargs)
    if not isinstance(target, (list, tuple)) or not target or args or kwargs:
        raise TypeError(
            "launch() needs a function and its arguments, or a list of words: launch(options, train, 3), or "
            'launch(options, ["train.py", "--lr", "0.1"]).'
        )
    with RuntimeDirectory("run") as folder:
        status = _run_job(replace(options, command=tuple(target)), Path(folder))
    if status:
        raise HorovodInternalError(f"The job ended with exit code {status}; its output says why.")
    return None


def launch_function(
    options: LaunchOptions,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    executable: str | None = None,
) -> list[Any]:
    """Call a function on every rank of a new job, see launch. executable: Python of the ranks; None for this one."""
    pickler = optional_import("cloudpickle", "run")
    with (
        tempfile.TemporaryDirectory(prefix="hvdkit-run-", dir=os.getcwd())
        if options.names_hosts
        else RuntimeDirectory("run") as folder
    ):
        Path(folder, FUNCTION).write_bytes(pickler.dumps((func, tuple(args), dict(kwargs), list(sys.path))))
        command = (executable or sys.executable, "-m", "hvdkit.launch.run_worker", str(folder))
        status = _run_job(replace(options, command=command, module=False), Path(folder))
        results = read_results(Path(folder))
        last = find_last(results) if status == 0 and is_elastic(options) else []
        if last:
            return [result.get() for result in last]
        return give_results(results, options.np if isinstance(options.np, int) else 0, status, folder)


def is_elastic(options: LaunchOptions) -> bool:
    """May the number of ranks change?"""
    wanted = {**read_environment(), **options.settings}
    named = (options.host_discovery_script, options.blacklist_cooldown_range, options.reset_limit)
    config = read_config(wanted)
    return bool(config.elastic or config.min_np or config.max_np) or any(one is not None for one in named)


def _run_job(options: LaunchOptions, folder: Path) -> int:
    """Run the job in a new process; returns hvdrun's exit code. Raises hvdrun's LaunchError.

    In this process an asyncio loop may run already, as in a notebook, and the caller handles signals.
    """
    file = folder / OPTIONS
    file.write_bytes(pickle.dumps(options))
    file.chmod(0o600)  # a variable of -x may be secret
    command = [sys.executable, "-m", "hvdkit.launch.run_launcher", str(os.getpid()), str(folder)]
    status = _wait_for(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    refusal = folder / REFUSAL
    if refusal.exists():
        raise pickle.loads(refusal.read_bytes())
    return status


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
    """Call func(*args, **kwargs) on every rank of a new job and return its value on each rank, by rank.

    func: pickled with cloudpickle, like its value, so a function of the script itself can be passed.
    args, kwargs: of func.
    num_proc, np: number of ranks; np takes precedence.
    hosts, hostfile: as for hvdrun; None for this machine.
    use_gloo, use_mpi: accepted without effect; hvdkit chooses the transport.
    verbose: not 0 to report every start.
    executable: the Python of the ranks; None for this one.
    options: Horovod's start_timeout, ssh_port, ssh_identity_file, output_filename, mpi_args, network_interfaces, and
    those of elastic jobs (min_np, max_np, reset_limit, ...).

    Function and results are written into a folder in /tmp or, for several hosts, in the working directory, which all
    hosts must share. The job ends if this process is killed (on Linux).
    Raises func's exception on the rank that failed first, from a HorovodInternalError with the rank, its host and its
    traceback. An exception that cannot be pickled or unpickled becomes a RuntimeError with its type and text. Raises
    LaunchError for a job that cannot be started, HorovodInternalError if the job fails otherwise.
    """
    if not callable(func):
        raise TypeError(f"run() needs a function, not {type(func).__name__}: run(train, args=(3,)), not run(train(3)).")
    if hosts is not None and hostfile is not None:
        raise LaunchError("run() was given hosts and hostfile. Leave one of them out.", code="hosts-given-twice")
    if use_gloo and use_mpi:
        raise LaunchError("run() was given use_gloo and use_mpi. Leave one of them out.", code="options-contradict")
    given = make_options(np if np is not None else num_proc, {"hosts": hosts, "hostfile": hostfile, **options})
    return launch_function(replace(given, verbose=bool(verbose)), func, args, kwargs or {}, executable)


def _wait_for(hvdrun: subprocess.Popen[bytes]) -> int:
    """Wait until hvdrun has ended the job, also after Ctrl-C, which is then raised; a second Ctrl-C kills hvdrun."""
    with hvdrun:
        try:
            try:
                return hvdrun.wait()
            except KeyboardInterrupt:
                hvdrun.send_signal(signal.SIGINT)  # a terminal sends it to hvdrun too, kill does not
                hvdrun.wait()
                raise
        except BaseException:
            hvdrun.kill()
            raise


def make_options(np: int, options: Mapping[str, Any]) -> LaunchOptions:
    """Convert Horovod's options to those of a job. Raises LaunchError for options that hvdkit does not have."""
    given = {_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    given.pop("disable_cache", None)
    unknown = [name for name in given if name not in _TAKEN]
    if unknown:
        raise LaunchError(
            f"run({unknown[0]}=...): there is no such option. It takes {', '.join(sorted(_TAKEN))}.",
            code="option-unknown",
        )
    interfaces = given.get("network_interfaces", "")
    if not isinstance(interfaces, str):
        given["network_interfaces"] = ",".join(interfaces)
    cooldown = given.get("blacklist_cooldown_range")
    if cooldown is not None:
        given["blacklist_cooldown_range"] = tuple(cooldown)
    return LaunchOptions(np=np, alias_horovod="hvdkit.alias_horovod" in sys.modules, **given)
