"""Frameworks, Keras's backend, settings."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.build_horovod.versions import PACKAGES_OF, parse_numbers
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job
from hvdkit.tools.doctor.look.packages import framework_versions

_KERAS_LEAST = (3, 5)
_BACKENDS = {"tensorflow": "hvdkit[tensorflow]", "torch": "hvdkit[torch]", "jax": "hvdkit[jax]"}


def check_packages(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge what is installed."""
    if facts.settings_error:
        yield Finding("error", "settings", facts.settings_error, "Correct or unset the variable; init() would fail.")
    versions = framework_versions(facts.packages)
    if not versions.keys() & {"torch", "tensorflow", "jax"}:
        yield Finding(
            "warning",
            "framework-missing",
            f"None of torch, TensorFlow and JAX is installed in {facts.prefix}.",
            "Run: pip install 'hvdkit[torch]', or activate the environment that has one.",
        )
    twins = [name for name in PACKAGES_OF["tensorflow"] if name in facts.packages]
    if len(twins) > 1:
        yield Finding(
            "error",
            "tensorflow-twice",
            f"{' and '.join(twins)} are both installed: the same files, one over the other.",
            f"Run: pip uninstall -y {' '.join(twins)}; then install one of them.",
        )
    if "keras" in versions:
        yield from _check_keras(facts, versions["keras"], set(versions))


def _check_keras(facts: Facts, version: str, frameworks: set[str]) -> Iterator[Finding]:
    if parse_numbers(version) < _KERAS_LEAST:
        yield Finding(
            "warning",
            "keras-old",
            f"Keras {version} is installed, hvdkit.keras needs 3.5.",
            "Run: pip install -U keras",
        )
        return
    backend, origin = facts.keras_backend, facts.keras_backend_origin
    if backend not in _BACKENDS:
        yield Finding(
            "error",
            "keras-backend",
            f"Keras is set to the backend {backend!r} ({origin}).",
            f"Set KERAS_BACKEND to one of {', '.join(sorted(frameworks & _BACKENDS.keys())) or ', '.join(_BACKENDS)}.",
        )
    elif backend not in frameworks:
        others = sorted(frameworks & _BACKENDS.keys())
        yield Finding(
            "error" if others and origin == "KERAS_BACKEND" else "warning",
            "keras-backend",
            f"Keras would take {backend} ({origin}), which is not installed.",
            " ".join(
                [*(f"Set KERAS_BACKEND={name}, or" for name in others[:1]), f"run: pip install '{_BACKENDS[backend]}'"]
            ),
        )
