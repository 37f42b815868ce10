"""What the table says of a host's parts: subject, what there is, where."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.build_horovod.versions import PACKAGES_OF
from hvdkit.tools.doctor.facts import KIND_NAMES, Facts

Row = tuple[str, str, str]


def list_parts(facts: Facts) -> Iterator[Row]:
    """List what is installed; what is missing is a row too."""
    packages = facts.packages
    yield "Python", facts.python, facts.executable
    yield "hvdkit", facts.hvdkit, facts.hvdkit_folder
    yield "torch", packages.get("torch", "-"), _cuda(facts) if "torch" in packages else ""
    names = [name for name in PACKAGES_OF["tensorflow"] if name in packages]
    yield "TensorFlow", ", ".join(packages[name] for name in names) or "-", ", ".join(names)
    backend = f"backend {facts.keras_backend} ({facts.keras_backend_origin})" if "keras" in packages else ""
    yield "Keras", packages.get("keras", "-"), backend
    yield "JAX", packages.get("jax", "-"), ""
    yield from _list_mpi(facts)
    yield from _list_horovod(facts)
    yield from _list_accelerators(facts)


def _list_mpi(facts: Facts) -> Iterator[Row]:
    mpi, hvdrun = facts.mpi, facts.hvdrun
    yield "mpi4py", mpi.mpi4py or "-", ""
    yield "MPI library", mpi.name or "-", mpi.path or mpi.error
    if mpi.library:
        yield "", f"MPI {mpi.standard}, {mpi.threads or 'does not start'}", "" if mpi.threads else mpi.error
    for launcher in facts.launchers:
        what = f"{KIND_NAMES.get(launcher.kind, '')} {launcher.version}".strip() or "does not work"
        yield launcher.name, what, launcher.path
    if hvdrun.mpirun:
        origin = "on PATH" if hvdrun.site else "from this environment"
        yield "hvdrun takes", f"{hvdrun.name} {hvdrun.version}, {origin}", hvdrun.mpirun
    else:
        yield "hvdrun takes", "-", ""


def _list_horovod(facts: Facts) -> Iterator[Row]:
    horovod = facts.horovod
    if not horovod.version:
        yield "Horovod", "-", ""
        return
    yield "Horovod", f"{horovod.version} for {', '.join(horovod.bindings) or 'no framework'}", horovod.folder
    if horovod.loaded:
        yield "", f"built with {', '.join(horovod.parts) or 'nothing'}", ""


def _list_accelerators(facts: Facts) -> Iterator[Row]:
    found = facts.accelerators
    if found.gpus:
        names = dict.fromkeys(gpu.name for gpu in found.gpus)
        shown = "all are visible" if found.visible is None else f"CUDA_VISIBLE_DEVICES={found.visible}"
        yield "GPUs", f"{len(found.gpus)}: {', '.join(names)}; driver {found.driver}", shown
    else:
        yield "GPUs", "-", found.error or (f"/dev has {', '.join(found.devices)}" if found.devices else "")
    yield "NCCL", found.nccl or ("?" if found.nccl_path else "-"), found.nccl_path
    yield "CUDA toolkit", "found" if found.cuda_home else "-", found.cuda_home


def _cuda(facts: Facts) -> str:
    cuda = facts.accelerators.torch_cuda
    return f"for CUDA {cuda}" if cuda else "for CPUs"
