"""Tell a plan to a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hvdkit.tools.build_horovod.cache import Cache
from hvdkit.tools.build_horovod.parts import Missing
from hvdkit.tools.build_horovod.plan import Plan
from hvdkit.tools.build_horovod.release import HOROVOD

_INDENT = " " * 14


def describe_plan(plan: Plan, cache: Cache) -> str:
    """Write the whole plan, a paragraph a subject."""
    return "\n".join(f"{title:<12}  {text}".rstrip() for title, text in _rows(plan, cache))


def describe_missing(missing: Iterable[Missing]) -> str:
    """Write what is missing, a part a line."""
    return "\n".join(f"  {part}" for part in missing)


def _rows(plan: Plan, cache: Cache) -> Iterator[tuple[str, str]]:
    site, mpi, wheel = plan.site, plan.site.mpi, cache.wheel(plan)
    source = plan.options.source or cache.source() or "to be downloaded by pip"
    yield "Horovod", f"{HOROVOD}, source {source}"
    versions = [f"{name} {getattr(site.frameworks, name)}" for name in site.frameworks.names]
    yield "for", ", ".join([*versions, site.python])
    yield "MPI", f"{mpi.name} {mpi.version}, {mpi.path}" if mpi else "none"
    yield "Gloo", "yes, Horovod brings it"
    yield "GPUs", f"{plan.gpu.operations or 'not used'}: {plan.gpu.why}"
    yield "compiler", f"{site.compiler or 'none'}, C++{plan.standard}, {plan.jobs} at a time"
    yield "cmake", f"{site.cmake or 'none'} {site.cmake_version}"
    yield "mends", _list(map(str, plan.mends)) or "none"
    yield "environment", _list(f"{name}={value}" for name, value in sorted(plan.variables.items()))
    if plan.removed:
        yield "left out", _list(f"{name}={site.environ[name]}" for name in plan.removed)
    yield "wheel", str(wheel) if wheel else f"to be built into {cache.folder(plan)}"
    yield "log", str(cache.log(plan))


def _list(lines: Iterable[str]) -> str:
    return f"\n{_INDENT}".join(lines)
