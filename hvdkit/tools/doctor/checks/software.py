"""Checks of frameworks, Keras's backend, settings and Horovod; and of everything that must be equal on all hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from hvdkit.tools.doctor.checks.mpi import GET_HOROVOD, HOROVOD, assess_engines
from hvdkit.tools.doctor.collect.software import framework_versions
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest, Severity
from hvdkit.tools.doctor.survey import Survey
from hvdkit.tools.installed import PACKAGES_OF, parse_numbers

_KERAS_LEAST = (3, 5)
_BACKENDS = {"tensorflow": "hvdkit[tensorflow]", "torch": "hvdkit[torch]", "jax": "hvdkit[jax]"}


def check_packages(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check frameworks and settings."""
    if facts.settings_error:
        yield Finding.error("settings", facts.settings_error, "Correct or unset the variable; init() would fail.")
    versions = framework_versions(facts.packages)
    if not versions.keys() & {"torch", "tensorflow", "jax"}:
        yield Finding.warning(
            "framework-missing",
            f"None of torch, TensorFlow and JAX is installed in {facts.prefix}.",
            "Run: pip install 'hvdkit[torch]', or activate the environment that has one.",
        )
    twins = [name for name in PACKAGES_OF["tensorflow"] if name in facts.packages]
    if len(twins) > 1:
        yield Finding.error(
            "tensorflow-twice",
            f"{' and '.join(twins)} are both installed: their files overwrite each other.",
            f"Run: pip uninstall -y {' '.join(twins)}; then install one of them.",
        )
    if "keras" in versions:
        yield from _check_keras(facts, versions["keras"], set(versions))


def _check_keras(facts: HostFacts, version: str, frameworks: set[str]) -> Iterator[Finding]:
    if parse_numbers(version) < _KERAS_LEAST:
        yield Finding.warning(
            "keras-old", f"Keras {version} is installed, hvdkit.keras needs 3.5.", "Run: pip install -U keras"
        )
        return
    backend, origin = facts.keras_backend, facts.keras_backend_origin
    if backend not in _BACKENDS:
        yield Finding.error(
            "keras-backend",
            f"Keras is set to the unknown backend {backend!r} (from {origin}).",
            f"Set KERAS_BACKEND to one of {', '.join(sorted(frameworks & _BACKENDS.keys())) or ', '.join(_BACKENDS)}.",
        )
    elif backend not in frameworks:
        others = sorted(frameworks & _BACKENDS.keys())
        yield Finding(
            "error" if others and origin == "KERAS_BACKEND" else "warning",
            "keras-backend",
            f"Keras is set to the backend {backend} (from {origin}), which is not installed.",
            " ".join(
                [*(f"Set KERAS_BACKEND={name}, or" for name in others[:1]), f"run: pip install '{_BACKENDS[backend]}'"]
            ),
        )


def check_horovod(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check Horovod. A missing Horovod is an error only if the setting of the engine requires it."""
    horovod = facts.horovod
    wanted = facts.settings.get("engine") == "horovod"
    ability = next(ability for ability in assess_engines(facts) if ability.name == "horovod")
    if wanted and not ability.works:
        yield Finding.error("engine-missing", f"The engine is set to horovod, but {ability.why}.", ability.cure)
        return
    severity: Severity = "error" if wanted else "warning"
    if not horovod.version:
        return
    if horovod.version != HOROVOD:
        yield Finding.warning(
            "horovod-version",
            f"Horovod {horovod.version} is installed ({horovod.folder}); hvdkit supports {HOROVOD}.",
            f"{GET_HOROVOD}, or leave the engine at native.",
        )
    versions = framework_versions(facts.packages)
    for framework, built_for in horovod.built_for.items():
        installed = versions.get(framework, "")
        if installed and built_for and installed != built_for:
            yield Finding(
                severity,
                "horovod-built-for-other",
                f"Horovod was built for {framework} {built_for}, but {framework} {installed} is installed: "
                f"importing it fails or crashes.",
                f"{GET_HOROVOD}, which builds it again.",
            )
            return
    for framework, error in horovod.errors.items():
        if framework in versions:
            yield Finding(
                severity, "horovod-broken", f"Horovod for {framework} cannot be loaded: {error}.", GET_HOROVOD
            )


#: With clocks further apart than this many seconds, timelines and logs are hard to read, and make rebuilds new files.
_CLOCK_S = 1.0
_MISSING = "not installed"


def check_versions(survey: Survey) -> Iterator[Finding]:
    """Compare the versions of packages that must be the same."""
    versions = {name: _list_versions(facts) for name, facts in survey.answering.items()}
    for subject in dict.fromkeys(subject for found in versions.values() for subject in found):
        groups: dict[str, list[str]] = defaultdict(list)
        for name, found in versions.items():
            groups[found.get(subject, _MISSING)].append(name)
        if len(groups) > 1:
            yield _report_difference(subject, groups)


def check_clocks(survey: Survey) -> Iterator[Finding]:
    """Compare the hosts' clocks with this host's."""
    for host in survey.hosts:
        if host.facts is not None and abs(host.offset_s) - host.error_s > _CLOCK_S:
            ahead = "ahead of" if host.offset_s > 0 else "behind"
            yield Finding.warning(
                "clock-differs",
                f"The clock of {host.name} is {abs(host.offset_s):.1f} s {ahead} this host's.",
                "Synchronize the clocks of all hosts (chronyd or ntpd).",
                (host.name,),
            )


def _list_versions(facts: HostFacts) -> dict[str, str]:
    found = {"Python": facts.python, "hvdkit": facts.hvdkit, **framework_versions(facts.packages)}
    for subject in ("mpi4py", "numpy"):
        found[subject] = facts.packages.get(subject, _MISSING)
    found["MPI"] = facts.mpi.name or _MISSING
    found["NCCL"] = facts.accelerators.nccl or _MISSING
    found["Horovod"] = facts.horovod.version or _MISSING
    found["the GPU driver"] = facts.accelerators.driver or _MISSING
    if "keras" in facts.packages:
        found["Keras's backend"] = facts.keras_backend
    return found


def _report_difference(subject: str, groups: Mapping[str, list[str]]) -> Finding:
    most = max(groups, key=lambda version: len(groups[version]))
    odd = tuple(name for version, names in groups.items() if version != most for name in names)
    seen = "; ".join(f"{version} on {', '.join(names)}" for version, names in groups.items())
    cure = "Install the same version on every host, best in one environment on a file system that all hosts share."
    return Finding(
        _rate_difference(subject, groups), "versions", f"{subject} is not the same on all hosts: {seen}.", cure, odd
    )


def _rate_difference(subject: str, versions: Mapping[str, list[str]]) -> Severity:
    if subject == "the GPU driver":
        return "note" if _MISSING not in versions else "warning"
    if subject == "Python":  # ranks exchange pickled objects, which works between 3.11.x, not always 3.11 and 3.12
        return "error" if len({version.rpartition(".")[0] for version in versions}) > 1 else "warning"
    return "warning" if subject == "numpy" else "error"
