"""Starts Horovod's core: passes settings, reads the identity of this process, and makes the transport of all ranks."""

from __future__ import annotations

import os

from hvdkit.alias import real_horovod
from hvdkit.config import Config
from hvdkit.engine.api import Abort, RankSubset
from hvdkit.errors import ConfigError, MissingDependencyError, WorldError
from hvdkit.hook import install_exception_hook
from hvdkit.transport.mpi.backend import open_rank_subset
from hvdkit.transport.mpi.library import abort, call_mpi, can_load_mpi, load_mpi
from hvdkit.world import World, check_world, complete_world, read_world, under_agent
from hvdkit_horovod.binding import Binding
from hvdkit_horovod.choice import CURE, built_bindings, choose_binding
from hvdkit_horovod.transport import HorovodTransport, ProcessSets, describe


def open_binding(framework: str) -> Binding:
    """Load the binding for a framework; see choose_binding()."""
    name = choose_binding(framework, built_bindings())
    try:
        with real_horovod():
            if name == "torch":
                from hvdkit_horovod.torch_binding import TorchBinding

                return TorchBinding()
            from hvdkit_horovod.tensorflow_binding import TensorflowBinding

            return TensorflowBinding()
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"Horovod's binding for {name} cannot be loaded: {error}. {CURE}") from error


def variables_for(config: Config) -> dict[str, str]:
    """Convert settings to the variables of Horovod with the same meaning."""
    variables = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": f"{config.stall_check_s:.0f}",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": f"{config.stall_shutdown_s:.0f}",
    }
    if not config.stall_check_s:
        variables["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    if config.searches:
        variables.update(HOROVOD_AUTOTUNE="1", HOROVOD_AUTOTUNE_LOG=config.autotune_log)
    if config.timeline:
        variables["HOROVOD_TIMELINE"] = config.timeline
    return variables


def open_horovod(
    config: Config, framework: str, subset: RankSubset | None = None
) -> tuple[World, HorovodTransport, Abort | None]:
    """Start Horovod; returns the same as open_transport().

    framework: framework whose binding is needed; "" if any will do. subset: the processes that form the world; None for
        all.
    Raises MissingDependencyError if Horovod or its binding is missing, WorldError if Horovod and the launcher disagree,
    or Horovod does not start.
    """
    world = read_world()
    binding = open_binding(framework)
    basics = binding.basics
    by_mpi = world.launcher not in ("horovodrun", "torchrun") and bool(basics.mpi_built())
    if by_mpi and can_load_mpi():
        load_mpi()  # ended at exit: Horovod would end it in shutdown(), and MPI starts only once
    end_job = abort if by_mpi and can_load_mpi() and not under_agent() else None
    install_exception_hook(world.rank, world.host, end_job)
    os.environ.update(variables_for(config))  # the only source of Horovod's settings; it reads them when it starts
    if subset is not None and not by_mpi:
        raise ConfigError(
            f"comm selects the job ranks {list(subset.ranks)}, but the installed Horovod was built without MPI. Run "
            "`hvdkit build-horovod` on a system with MPI, or use the native engine (HVDKIT_ENGINE=native)."
        )
    with real_horovod():
        from horovod import __version__
    library = f"Horovod {__version__} ({describe(basics)})"
    by_gloo = not basics.mpi_built() or os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
    if by_gloo and world.launcher != "horovodrun":
        check_world(world, 1, library)  # its Gloo would wait for the number of ranks in hvdrun's HOROVOD_SIZE
    comm = open_rank_subset(subset, world) if subset is not None else None
    try:
        binding.module.init(comm=comm, process_sets="dynamic")
    except ValueError as error:
        raise WorldError(f"Horovod failed to start: {error} See Horovod's own messages above.") from error
    finally:
        if comm is not None:
            call_mpi("MPI_Comm_free", comm.Free)  # Horovod has its own copy
    # horovodrun informs Horovod of later worlds, and the variables keep their first values.
    if subset is None and world.launcher != "horovodrun":
        check_world(world, basics.size(), library)
    facts = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    world = complete_world(
        world,
        **{fact: getattr(basics, fact)() for fact in facts},
        homogeneous=basics.is_homogeneous(),
        job_ranks=subset.ranks if subset is not None else (),
    )
    sets = ProcessSets(binding.module, world.size)
    return world, HorovodTransport(binding, sets, range(world.size), world.rank), end_job
