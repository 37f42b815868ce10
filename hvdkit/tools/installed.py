"""What is installed here: versions of the frameworks and packages, without importing them; data files of hvdkit."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hvdkit
from hvdkit.errors import HvdkitError

#: The packages that contain a framework's module.
PACKAGES_OF = {
    "torch": ("torch",),
    "tensorflow": (
        *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-aarch64"),
        *("tensorflow-intel", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
    ),
}
_OTHERS = re.compile(r"^(hip|xpu)\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Frameworks:
    """The versions of the frameworks; "" for a framework that is not installed.

    torch_cuda: the CUDA version for which torch was built, "" for a CPU build.
    torch_other: the same for AMD's HIP and Intel's XPU: "hip" or "xpu" -> the version, for those that it was built for.
    """

    torch: str = ""
    torch_cuda: str = ""
    tensorflow: str = ""
    torch_other: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The module names of the installed frameworks."""
        return tuple(name for name in ("torch", "tensorflow") if getattr(self, name))


def read_frameworks() -> Frameworks:
    """Read the package metadata of this Python."""
    text = _read_torch_version_file()
    return Frameworks(
        torch=find_version("torch"),
        torch_cuda=parse_torch_cuda(text),
        torch_other=parse_torch_other(text),
        tensorflow=next(filter(None, map(find_version, PACKAGES_OF["tensorflow"])), ""),
    )


def find_version(package: str) -> str:
    """Find the installed version of a package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_package(package: str, folder: str) -> Path | None:
    """Find a path in the folder of a package's files; it need not exist. None if the package is not installed."""
    try:
        return Path(str(importlib.metadata.distribution(package).locate_file(folder)))
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_numbers(version: str) -> tuple[int, ...]:
    """Take the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu", (2, 1) of "2.1rc2"."""
    found = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def parse_torch_cuda(text: str) -> str:
    """Take the CUDA version from the text of torch/version.py; "" if it has none."""
    found = _CUDA.search(text)
    return found.group(1) if found else ""


def parse_torch_other(text: str) -> dict[str, str]:
    """Take the versions of HIP and XPU from the text of torch/version.py, for those that torch was built for."""
    return dict(_OTHERS.findall(text))


def _read_torch_version_file() -> str:
    path = find_package("torch", "torch/version.py")
    return path.read_text(errors="replace") if path is not None and path.is_file() else ""


def find_data(name: str, cloned: str, pattern: str) -> tuple[Path, list[Path]]:
    """Find files of hvdkit that are no code; returns their folder, and the files in order.

    A wheel has the folder inside the package (setup.py puts it there). Without it, hvdkit is an editable install, whose
    files are those of the clone. Raises HvdkitError if the folder has none.

    name: of the folder in the package.
    cloned: of the folder in the clone.
    pattern: of the files, as of Path.glob().
    """
    package = Path(hvdkit.__file__).parent
    folder = package / name if (package / name).is_dir() else package.parent / cloned
    files = sorted(folder.glob(pattern))
    if not files:
        raise HvdkitError(f"no {name} are installed: {folder} has no {pattern}. Install hvdkit again.")
    return folder, files
