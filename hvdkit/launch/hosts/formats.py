"""The dialects by name. A new one is a file and a line here."""

from __future__ import annotations

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts.deepspeed import DEEPSPEED
from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.horovod import HOROVOD
from hvdkit.launch.hosts.hydra import HYDRA
from hvdkit.launch.hosts.intel import INTEL, MACHINEFILE
from hvdkit.launch.hosts.kubernetes import KUBERNETES
from hvdkit.launch.hosts.lsf import LSF
from hvdkit.launch.hosts.openmpi import OPENMPI
from hvdkit.launch.hosts.pbs import PBS
from hvdkit.launch.hosts.plain import PLAIN
from hvdkit.launch.hosts.sge import SGE
from hvdkit.launch.hosts.slurm import SLURM

#: In the order in which a text is taken for one of them.
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        SLURM, OPENMPI, HYDRA, PBS, LSF, SGE, KUBERNETES, MACHINEFILE, INTEL, HOROVOD, DEEPSPEED, PLAIN,
    )
}  # fmt: skip

#: Find out by looking at the text.
AUTO = "auto"

_SYNONYMS = {"prrte": "openmpi", "mpich": "hydra", "impi": "intel", "uge": "sge", "k8s": "kubernetes"}


def find_dialect(name: str) -> Dialect:
    """Find a dialect by the name that --hostfile-format takes, in any case. Raises LaunchError for one not known."""
    word = name.strip().lower()
    try:
        return DIALECTS[_SYNONYMS.get(word, word)]
    except KeyError:
        known = ", ".join(sorted(DIALECTS))
        raise LaunchError(f"There is no hostfile format {name!r}. Use {AUTO} or one of {known}.") from None
