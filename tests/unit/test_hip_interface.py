"""Our table of HIP is that of HIP's header, and RCCL's header has our table of NCCL, where ROCm is installed.

ROCM_PATH is the folder of ROCm. The headers are no part of this repository.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hvdkit.transport import gpu_driver
from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.hip import HIP
from hvdkit.transport.nccl.library import OPERATIONS, RCCL, REDUCIBLE, Config, Result, UniqueId

_FOLDER = Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "include")
_HIP, _RCCL = _FOLDER / "hip" / "hip_runtime_api.h", _FOLDER / "rccl" / "rccl.h"
#: Types of C that ctypes has no name for -> kind in a call.
_KINDS = {
    **dict.fromkeys(("int", "hipDevice_t", "hipError_t", "ncclDataType_t", "ncclRedOp_t"), "int"),
    **dict.fromkeys(("ncclResult_t", "ncclScalarResidence_t"), "int"),
    **dict.fromkeys(("unsigned int", "unsigned"), "unsigned int"),
    **dict.fromkeys(("hipStream_t", "hipEvent_t", "ncclComm_t"), "pointer"),
    "size_t": "size_t",
    "ncclUniqueId": "struct",
}
_OF_CTYPES = {ctypes.c_int: "int", ctypes.c_uint: "unsigned int", ctypes.c_size_t: "size_t", UniqueId: "struct"}
pytestmark = pytest.mark.skipif(
    not (_HIP.exists() and _RCCL.exists()), reason=f"no GPU of AMD's: ROCm's headers are not in {_FOLDER}"
)


def _declared(header: str, symbol: str) -> list[str]:
    """The kinds of a function's parameters."""
    (parameters,) = set(re.findall(rf"^\s*(?:\w+ )?\w+\W+{symbol}\s*\(([^)]*)(?=\))", header, re.M)) or {None}
    assert parameters is not None, f"{symbol} is not in the header"
    kinds = []
    for parameter in filter(None, (part.strip() for part in parameters.split(","))):
        if parameter == "void":
            continue
        kind = re.sub(r"\bconst\b|\w+$", "", parameter.partition("=")[0].strip()).strip()
        kinds.append("pointer" if kind.endswith("*") else _KINDS[kind])
    return kinds


def _ours(kind: Any) -> str:
    return _OF_CTYPES.get(kind, "pointer")


def _read(path: Path) -> str:
    text = re.sub(r"/\*.*?\*/|//[^\n]*|^\s*#[^\n]*", "", path.read_text(), flags=re.S | re.M)
    return re.sub(r"\s*__dparm\([^)]*\)|\s*=\s*NULL", "", text)


@pytest.mark.parametrize("library, path", [(HIP, _HIP), (RCCL, _RCCL)], ids=["HIP", "RCCL"])
def test_functions(library: CLibrary, path: Path) -> None:
    header = _read(path)
    for symbol, types in library.functions.values():
        assert [_ours(kind) for kind in types] == _declared(header, symbol), symbol


def test_numbers_of_hip() -> None:
    text = _HIP.read_text()
    for name, ours in (
        ("hipSuccess", gpu_driver._SUCCESS),
        ("hipErrorOutOfMemory", gpu_driver._OUT_OF_MEMORY),
        ("hipErrorNotReady", gpu_driver._NOT_READY),
    ):
        assert re.search(rf"^\s*{name}\s*=\s*{ours}\b", text, re.M), name
    for name, ours in (
        ("hipStreamNonBlocking", gpu_driver._NON_BLOCKING),
        ("hipEventDisableTiming", gpu_driver._DISABLE_TIMING),
    ):
        (number,) = re.findall(rf"^#define {name}\s+(\w+)", text, re.M)
        assert int(number, 0) == ours
    modes = re.search(r"typedef enum hipStreamCaptureMode \{(.*?)\}", text, re.S)
    assert modes is not None
    names = re.findall(r"hipStreamCaptureMode(\w+)", modes[1])
    assert "= 0" in modes[1] and names[gpu_driver._THREAD_LOCAL] == "ThreadLocal"
    assert "char bytes[16]" in text and ctypes.sizeof(gpu_driver.Uuid) == 16


def test_numbers_and_structs_of_rccl() -> None:
    text = _RCCL.read_text()
    camel = {one: "".join(map(str.capitalize, one.name.split("_"))) for one in Result}
    expected = {f"nccl{camel[one]}": one.value for one in Result if one is not Result.TIMEOUT}  # newer than 2.21
    expected |= {f"nccl{name.capitalize()}": number for name, number in REDUCIBLE.items()}
    names = {"sum": "Sum", "product": "Prod", "max": "Max", "min": "Min", "average": "Avg"}
    expected |= {f"nccl{names[name]}": number for name, number in OPERATIONS.items()}
    found = {name: int(number) for name, number in re.findall(r"\b(nccl\w+)\s*=\s*(\d+)", text)}
    assert {name: found.get(name) for name in expected} == expected
    config = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\}", text, re.S)
    assert config is not None and "#define NCCL_UNIQUE_ID_BYTES 128" in text
    fields = [name.lower() for name in re.findall(r"^\s*(?:const )?\w+(?: int)? \*?(\w+);", config[1], re.M)]
    ours = [name.replace("_", "") for name, *_ in Config._fields_]
    assert fields[: len(ours)] == ours[: len(fields)]
