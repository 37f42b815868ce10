from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hvdkit

HEAVY = {"torch", "tensorflow", "keras", "jax", "mpi4py", "horovod"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` has run in a fresh interpreter."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stderr.split())


def test_importing_hvdkit_brings_in_no_framework_and_no_mpi() -> None:
    assert not modules_after("import hvdkit") & (HEAVY | {"numpy", "rich"})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_importing_the_keras_adapter_loads_no_module_of_nccl(backend: str) -> None:
    """On PyTorch they come with hvdkit.torch, which tests each tensor's device in an operation."""
    pytest.importorskip(backend)
    code = f"import os, sys\nos.environ['KERAS_BACKEND'] = '{backend}'\nimport hvdkit.keras\n"
    code += "print(*(name for name in sys.modules if name.startswith('hvdkit.transport.nccl.')), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert "hvdkit.transport" not in done.stderr


def test_using_a_public_name_brings_in_no_framework_and_no_mpi() -> None:
    assert not modules_after("import hvdkit; hvdkit.Config(); hvdkit.HvdkitError") & HEAVY


@pytest.mark.parametrize("module", ["hvdkit.launch.cli.hvdrun", "hvdkit.cli"])
def test_the_help_of_a_command_brings_in_no_framework_and_no_mpi(module: str) -> None:
    code = f"from {module} import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not modules_after(code) & (HEAVY | {"numpy"})


def test_every_public_name_is_there() -> None:
    assert set(hvdkit.__all__) <= set(dir(hvdkit))
    for name in hvdkit.__all__:
        assert getattr(hvdkit, name) is not None


def test_every_error_is_public() -> None:
    errors = {name for name, value in vars(hvdkit.errors).items() if isinstance(value, type)}
    assert {name for name in errors if name.endswith("Error")} <= set(hvdkit.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hvdkit.nothing


@pytest.mark.parametrize("name", ["federated", "ray", "spark"])
def test_a_module_that_became_a_package_names_it(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"packages/{name}.*import hvdkit_{name}"):
        importlib.import_module(f"hvdkit.{name}")


def test_an_alias_of_a_package_that_is_not_installed_says_what_to_install() -> None:
    code = "import hvdkit.alias_horovod\nimport horovod.ray"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install -c constraints.txt ./packages/ray" in done.stderr.splitlines()[-1]
