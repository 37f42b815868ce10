"""Horovod: does what is installed fit the frameworks, and can it be used where it is asked for?"""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.build_horovod.release import HOROVOD
from hvdkit.tools.doctor.abilities import GET_HOROVOD, judge_engines
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding, Severity
from hvdkit.tools.doctor.job import Job
from hvdkit.tools.doctor.look.packages import framework_versions


def check_horovod(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge Horovod. It need not be there; then it is an error only if it is asked for."""
    horovod = facts.horovod
    wanted = facts.settings.get("engine") == "horovod"
    ability = next(ability for ability in judge_engines(facts) if ability.name == "horovod")
    if wanted and not ability.works:
        yield Finding("error", "engine-missing", f"The engine is set to horovod, and {ability.why}.", ability.cure)
        return
    severity: Severity = "error" if wanted else "warning"
    if not horovod.version:
        return
    if horovod.version != HOROVOD:
        yield Finding(
            "warning",
            "horovod-version",
            f"Horovod {horovod.version} is installed ({horovod.folder}); hvdkit knows {HOROVOD}.",
            f"{GET_HOROVOD}, or leave the engine at native.",
        )
    versions = framework_versions(facts.packages)
    for framework, built_for in horovod.built_for.items():
        installed = versions.get(framework, "")
        if installed and built_for and installed != built_for:
            yield Finding(
                severity,
                "horovod-built-for-other",
                f"Horovod was built for {framework} {built_for}, and {framework} {installed} is installed: "
                f"importing it fails or crashes.",
                f"{GET_HOROVOD} builds it anew.",
            )
            return
    for framework, error in horovod.errors.items():
        if framework in versions:
            yield Finding(
                severity, "horovod-broken", f"Horovod for {framework} cannot be loaded: {error}.", GET_HOROVOD
            )
