"""The variables of the ranks: those of hvdrun's environment that are sent to them, and those with the rank's numbers.

From the latter, scripts for torchrun, Keras' distribution and JAX read their rank and the address of the others, and
scripts for Horovod read their rank.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdkit.errors import LaunchError
from hvdkit.launch.agent.host_info import PORT_COUNT
from hvdkit.world import HOROVODRUN_STORE, HVDRUN_RUN_ID, name_as_horovodrun

# Set by the launcher of another job (hvdrun inside a rank): with them a second mpirun would act as part of that job.
_OTHER_LAUNCHER = re.compile(
    r"OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*|PMIX_(?!MCA_).*|PRTE_(?!MCA_).*|PMI_.*|HYDI_.*|HYDRA_PROXY.*|MPI_LOCAL.*"
    r"|HVDKIT_AGENT|HVDKIT_JOB|HVDKIT_RANK_PROCESS|HVDKIT_START|HVDKIT_PREFIX|HVDKIT_CONTROL.*|OPAL_PREFIX|ORTE_.*"
)

# Valid on this host, in this login or in this shell only.
_HOST_ONLY = re.compile(
    r"HOSTNAME|HOST|DISPLAY|XAUTHORITY|SSH_.*|TMPDIR|TMP|TEMP|XDG_.*|DBUS_.*|PWD|OLDPWD|SHLVL|_|TTY|GPG_TTY|TMUX.*|STY"
    r"|WINDOWID|TERM_SESSION_ID|VSCODE_.*|BASH_FUNC.*|BASHOPTS|SHELLOPTS|PS[0-4]|LS_COLORS|MAIL|LOGNAME|USER|HOME|SHELL"
    r"|SLURM_.*|PBS_.*|LSB_.*|OMPI_.*|PMIX_.*|PRTE_.*|FLUX_.*|_CONDOR_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|NOTIFY_SOCKET"
)
#: Required by Python to start.
PYTHON_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
# Required by launchers, Python and hvdkit to start a rank.
_NEEDED = re.compile(
    "|".join(PYTHON_VARIABLES) + r"|HVDKIT_.*|I_MPI_.*|HYDRA_.*|MPICH_.*|MPIEXEC_.*|MPI4PY_.*|PALS_.*|JSM_.*|LSF_.*"
)
# Sent by mpirun itself.
_MCA = re.compile(r"(OMPI|PMIX|PRTE)_MCA_.*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# Set by torchrun or by hvdrun if TORCHELASTIC_RUN_ID is set; otherwise the user's own.
_OTHER_TORCHRUN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_.*|KERAS_DISTRIBUTION_.*|JAX_(COORDINATOR_ADDRESS|NUM_PROCESSES|PROCESS_ID)"
)
_HOROVOD_NUMBERS = r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME)"
# Set by hvdrun, or by `horovodrun --gloo` if HOROVOD_GLOO_RENDEZVOUS_ADDR is set; otherwise the user's own.
_OTHER_HVDRUN = re.compile(f"{_OTHER_TORCHRUN.pattern}|{_HOROVOD_NUMBERS}")
_OTHER_HOROVODRUN = re.compile(f"{_HOROVOD_NUMBERS}|HOROVOD_(GLOO_RENDEZVOUS_(ADDR|PORT)|CONTROLLER|CPU_OPERATIONS)")


def find_launcher_variables(environ: Iterable[str]) -> tuple[str, ...]:
    """Name the variables of another job's launcher, which must not be sent to this job's ranks."""
    names, patterns = set(environ), [_OTHER_LAUNCHER]
    if "TORCHELASTIC_RUN_ID" in names:
        patterns.append(_OTHER_HVDRUN)
    if HOROVODRUN_STORE in names:
        patterns.append(_OTHER_HOROVODRUN)
    return tuple(sorted(name for name in names if any(pattern.fullmatch(name) for pattern in patterns)))


def find_horovod_variables(environ: Iterable[str]) -> tuple[str, ...]:
    """Name the variables with a rank's numbers, of horovodrun and hvdrun, and those of horovodrun's rendezvous."""
    return tuple(sorted(filter(_OTHER_HOROVODRUN.fullmatch, environ)))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy the environment without another launcher's variables."""
    removed = set(find_launcher_variables(environ))
    return {name: value for name, value in environ.items() if name not in removed}


def withhold(environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Copy the environment without the variables that match a pattern, such as "AWS_*".

    Variables that ranks or launchers require are kept. So are those of this host (SSH_AUTH_SOCK, TMPDIR), which the
    launcher and ranks on this host inherit.
    Raises LaunchError for a pattern that matches only such variables.
    """
    kept = [name for name in environ if _NEEDED.fullmatch(name) or _HOST_ONLY.fullmatch(name)]
    for pattern in patterns:
        matches = fnmatch.filter(environ, pattern)
        if matches and set(matches) <= set(kept):
            raise LaunchError(
                f"--no-forward-env {pattern}: {', '.join(sorted(matches))} cannot be withheld, because ranks or the "
                "launcher require it. Variables of this host, such as SSH_AUTH_SOCK, are not sent to other hosts. "
                "Remove the option, or unset the variable.",
                code="variable-required",
            )
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def select_forwarded(environ: Mapping[str, str], wanted: Collection[str] = ()) -> tuple[str, ...]:
    """Name the variables to send to other hosts: all but those of this host.

    OMPI_MCA_ and similar variables are left out because mpirun sends them itself; values with a line break because
    ssh's command line does not preserve them. wanted: sent even if they are this host's (-x).
    """
    return tuple(
        sorted(
            name
            for name, value in environ.items()
            if _IDENTIFIER.fullmatch(name)
            and "\n" not in value
            and (not _HOST_ONLY.fullmatch(name) or (name in wanted and not _MCA.fullmatch(name)))
        )
    )


# The same on all ranks; the user's value takes precedence.
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "KERAS_DISTRIBUTION_JOB_ADDRESSES", "JAX_COORDINATOR_ADDRESS")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def plan_rank_variables(
    hosts: Mapping[int, str],
    address: str,
    ports: Sequence[int],
    job: str,
    environ: Mapping[str, str],
    local_ranks: Mapping[int, int] | None = None,
) -> dict[int, dict[str, str]]:
    """Plan the variables of each rank.

    hosts: the host of each rank, by rank.
    address: of rank 0's host, as the other ranks reach it.
    ports: free ports of that host, PORT_COUNT or none; without them the addresses are left out.
    job: its name.
    environ: the ranks' environment, which takes precedence.
    local_ranks: by rank; None for the order of the ranks on their host.

    Raises LaunchError for variables of the user that contradict this job.
    """
    places = _number_ranks(hosts, local_ranks)
    planned = {rank: {**_name_numbers(place), **_name_horovods(place, hosts[rank])} for rank, place in places.items()}
    _refuse_contradictions(planned, environ)
    shared = _plan_addresses(address, ports)
    shared["TORCHELASTIC_RUN_ID"] = f"{HVDRUN_RUN_ID}{job}"
    if shared.keys() & set(_PLACES) and any(environ.get(name) for name in _PROXIES):
        # JAX's processes connect by gRPC, which uses a proxy for each address that is not listed here.
        shared["no_grpc_proxy"] = ",".join(filter(None, (address, environ.get("no_proxy"))))
    return {
        rank: {name: value for name, value in {**shared, **own}.items() if name not in environ}
        for rank, own in planned.items()
    }


def plan_horovod_variables(hosts: Mapping[int, str]) -> dict[int, dict[str, str]]:
    """Plan the variables from which Horovod's scripts read their rank, for the ranks of a changed world.

    hosts: of the ranks of the world, by their job rank. The ranks are in the order of the job ranks.
    """
    ranks = dict(enumerate(sorted(hosts)))
    places = _number_ranks({rank: hosts[number] for rank, number in ranks.items()})
    return {number: _name_horovods(places[rank], hosts[number]) for rank, number in ranks.items()}


class _Place(NamedTuple):
    """A rank's numbers. host: of its host among all hosts. cross_rank: among the ranks of the same local_rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: int
    hosts: int


def _number_ranks(hosts: Mapping[int, str], local_ranks: Mapping[int, int] | None = None) -> dict[int, _Place]:
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))}
    local_sizes, cross_sizes = Counter(hosts.values()), Counter[int]()
    seen, before = Counter[str](), {}
    for rank in sorted(hosts):
        local_rank = seen[hosts[rank]] if local_ranks is None else local_ranks[rank]
        before[rank] = local_rank, cross_sizes[local_rank]
        seen[hosts[rank]] += 1
        cross_sizes[local_rank] += 1
    return {
        rank: _Place(
            *(rank, len(hosts), local_rank, local_sizes[hosts[rank]], cross_rank, cross_sizes[local_rank]),
            *(order[hosts[rank]], len(order)),
        )
        for rank, (local_rank, cross_rank) in before.items()
    }


def is_number_of_rank(name: str) -> bool:
    """Does hvdrun set this variable, to a value that depends on the rank or on the job's size?"""
    alone = _Place(0, 1, 0, 1, 0, 1, 0, 1)
    return name in _name_numbers(alone) or name in _name_horovods(alone, "")


def _name_numbers(place: _Place) -> dict[str, str]:
    numbers = dict.fromkeys(("RANK", "ROLE_RANK", "KERAS_DISTRIBUTION_PROCESS_ID", "JAX_PROCESS_ID"), place.rank)
    numbers |= dict.fromkeys(
        ("WORLD_SIZE", "ROLE_WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES", "JAX_NUM_PROCESSES"), place.size
    )
    numbers |= {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}
    numbers |= {"GROUP_RANK": place.host, "GROUP_WORLD_SIZE": place.hosts}
    return {name: str(number) for name, number in numbers.items()}


def _name_horovods(place: _Place, host: str) -> dict[str, str]:
    """Return the variables that horovodrun sets for a rank."""
    words = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return name_as_horovodrun({**{word: getattr(place, word) for word in words}, "host": host})


def _plan_addresses(address: str, ports: Sequence[int]) -> dict[str, str]:
    if len(ports) < PORT_COUNT:
        return {}
    coordinator = f"[{address}]:{ports[1]}" if ":" in address else f"{address}:{ports[1]}"
    return dict(zip(_PLACES, (address, str(ports[0]), coordinator, coordinator), strict=True))


def _refuse_contradictions(planned: Mapping[int, Mapping[str, str]], environ: Mapping[str, str]) -> None:
    wrong = {}
    for name in planned[min(planned)]:
        values = {each[name] for each in planned.values()}
        if name in environ and values != {environ[name]}:
            wrong[name] = f"{name}={environ[name]} ({values.pop() if len(values) == 1 else 'each rank has its own'})"
    if wrong:
        ranks = f"{len(planned)} rank{'s' * (len(planned) > 1)}"
        raise LaunchError(
            f"Variables of the environment contradict this job of {ranks}; the job's values are in brackets: "
            f"{', '.join(wrong.values())}. Scripts for torchrun, Keras, JAX or Horovod would wait for ranks that do "
            f"not exist. Run: unset {' '.join(wrong)}",
            code="environment-contradicts",
        )
    port = environ.get("MASTER_PORT")
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        raise LaunchError(
            f"MASTER_PORT={port} is no port; set one from 1 to 65535, or run: unset MASTER_PORT",
            code="master-port-invalid",
        )
