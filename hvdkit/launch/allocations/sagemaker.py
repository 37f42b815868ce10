"""Find hosts without a scheduler: those of a SageMaker training job, or of the default hostfile of an MPI.

SageMaker's training toolkit sets variables (ENVIRONMENT_VARIABLES.md) and starts the entry point on every host, or the
ranks by its own mpirun with distribution={"mpi": ...}. A variable of Open MPI, MPICH or Intel MPI names the default
hostfile; the MPI Operator of Kubernetes sets these variables in its launcher pod.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import FoundHosts, Host, find_hostfile
from hvdkit.launch.hostfiles.names import check_name, is_slots

_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}", re.ASCII)


def read_sagemaker(environ: Mapping[str, str]) -> FoundHosts | None:
    """Read SM_HOSTS, with a slot for each of SM_NUM_GPUS GPUs, or one slot; None outside of SageMaker.

    Raises LaunchError on a host other than the first, where a second hvdrun would start all ranks again.
    """
    if "SM_HOSTS" not in environ:
        return None
    names = _read_hosts(environ["SM_HOSTS"])
    current = environ.get("SM_CURRENT_HOST", names[0])
    if current not in names:
        raise LaunchError(
            f"SM_CURRENT_HOST={current!r} is not in SM_HOSTS={environ['SM_HOSTS']}. Name the hosts with -H.",
            code="sagemaker-host",
        )
    if current != names[0]:
        raise LaunchError(
            f"SageMaker has started the entry point on each of {len(names)} hosts, and this is {current}. Start hvdrun "
            f"on {names[0]} only, and sshd on the others (examples/sagemaker/train.sh does so).",
            code="sagemaker-not-first-host",
        )
    gpus = environ.get("SM_NUM_GPUS", "0")
    if not re.fullmatch(r"[0-9]{1,3}", gpus, re.ASCII):
        raise LaunchError(
            f"SM_NUM_GPUS={gpus!r} is not a number of GPUs. Correct it, or use --slots-per-host.", code="sagemaker-gpus"
        )
    interface = environ.get("SM_NETWORK_INTERFACE_NAME", "")
    if interface and not _INTERFACE.fullmatch(interface):
        raise LaunchError(
            f"SM_NETWORK_INTERFACE_NAME={interface!r} is not the name of an interface. Correct or unset it.",
            code="sagemaker-interface",
        )
    hosts = tuple(Host(name, max(1, int(gpus))) for name in names)
    note = f"SM_NETWORK_INTERFACE_NAME={interface}: ranks on different hosts use it, as with --network-interfaces."
    notes = (note,) if interface and len(names) > 1 else ()
    return FoundHosts(hosts, "SageMaker's SM_HOSTS", notes, interface=interface)


def _read_hosts(text: str) -> list[str]:
    cure = 'It must be a JSON list of names like ["algo-1","algo-2"]. Correct it, or name the hosts with -H.'
    try:
        names = json.loads(text)
        if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
            raise ValueError("it is not a list of names")
        if len(set(names)) < len(names):
            raise ValueError("it names a host twice")
        return [check_name(name) for name in names]
    except (ValueError, RecursionError) as problem:
        raise LaunchError(f"SM_HOSTS={text[:200]!r}: {problem}. {cure}", code="sagemaker-hosts") from None


# (variable with the file, its dialect, variable with the slots of hosts that have none in the file). The MPI Operator
# writes pod:slots for Intel MPI too, which Intel's own -hostfile does not allow.
_VARIABLES = (
    ("PRTE_MCA_prte_default_hostfile", "openmpi", "PRTE_MCA_prte_set_default_slots"),
    ("OMPI_MCA_orte_default_hostfile", "openmpi", "OMPI_MCA_orte_set_default_slots"),
    ("HYDRA_HOST_FILE", "kubernetes", ""),
    ("I_MPI_HYDRA_HOST_FILE", "kubernetes", "I_MPI_PERHOST"),
)


def read_default_hostfile(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts of the default hostfile; None if no variable names a hostfile."""
    for name, dialect, default in _VARIABLES:
        if name in environ:
            found = find_hostfile(environ[name], dialect, slots or _read_default_slots(environ, default))
            return replace(found, source=f"{name}={environ[name]}", allocated=True)
    return None


def _read_default_slots(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").strip()
    if value in ("", "cores", "allcores", "all"):
        return None
    if not is_slots(value):
        raise LaunchError(
            f"{name}={value!r} is not a number of slots. Correct it, or use --slots-per-host, which overrides it.",
            code="slots-variable",
        )
    return int(value)
