"""The steps of hvdkit build-horovod, one after the other."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from hvdkit.config import read_environment
from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.cache import Cache, open_cache
from hvdkit.tools.build_horovod.compile import compile_wheel
from hvdkit.tools.build_horovod.describe import describe_missing, describe_plan
from hvdkit.tools.build_horovod.install import check_horovod, install_wheel
from hvdkit.tools.build_horovod.parts import find_missing
from hvdkit.tools.build_horovod.plan import Options, Plan, build_plan
from hvdkit.tools.build_horovod.progress import BuildProgress
from hvdkit.tools.build_horovod.release import HOROVOD
from hvdkit.tools.build_horovod.site import read_site
from hvdkit.tools.build_horovod.source import check_source, download_source, read_digest

_RANKS = 2


def carry_out(options: argparse.Namespace) -> None:
    """Plan, check, build, install and try. Raises BuildError for whatever keeps Horovod from working here."""
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
    archive = Path(plan.options.source) if plan.options.source else cache.source()
    if archive is None:
        cache.make(cache.sources)
        archive = download_source(cache.sources, plan.site.environ)
    elif not plan.options.source:
        check_source(archive)
    print(f"building Horovod {HOROVOD}, {plan.jobs} compilers at a time; log: {cache.log(plan)}", flush=True)
    start = time.monotonic()
    with BuildProgress(Console()) as progress:
        wheel = compile_wheel(plan, archive, cache, progress.listen)
    print(f"built in {time.monotonic() - start:.0f} s: {wheel}", flush=True)
    return wheel
