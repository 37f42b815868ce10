"""Our table of NCCL's functions, numbers and structs is that of nccl4py, NVIDIA's own binding, made from nccl.h.

What nccl4py declares is in nccl4py.json. To record another version: install nccl4py (numpy, packaging, cuda-core and
cuda-pathfinder come with it, no part of CUDA) and run HVDKIT_TEST_RECORD=1 pytest tests/unit/test_nccl_interface.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hvdkit.transport.nccl import library
from hvdkit.transport.nccl.library import HOST_SCALAR, OPERATIONS, REDUCIBLE, Config, Result, UniqueId

_RECORD = Path(__file__).parents[1] / "data" / "nccl4py.json"
_ENUMS = ("ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclScalarResidence_t")
_OURS = library._FUNCTIONS
_DTYPES = {
    "ncclInt8": "int8",
    "ncclUint8": "uint8",
    "ncclInt32": "int32",
    "ncclUint32": "uint32",
    "ncclInt64": "int64",
    "ncclUint64": "uint64",
    "ncclFloat16": "float16",
    "ncclFloat32": "float32",
    "ncclFloat64": "float64",
    "ncclBfloat16": "bfloat16",
}
_OPS = {"ncclSum": "sum", "ncclProd": "product", "ncclMax": "max", "ncclMin": "min", "ncclAvg": "average"}


def _read(declarations: str) -> dict[str, Any]:
    """What a .pxd file declares: numbers of enums, types of parameters and results, fields of ncclConfig_t."""
    functions = {
        name: [result.strip(), *(re.sub(r"\bconst\b|\b\w+$", "", one).strip() for one in arguments.split(",") if one)]
        for result, name, arguments in re.findall(r"^cdef (?:const )?([\w*]+) (nccl\w+)\((.*?)\)", declarations, re.M)
        if name in _OURS
    }
    enums = {}
    for enum in _ENUMS:
        (body,) = re.findall(rf"^ctypedef enum {enum} .*\n((?:    .*\n)+)", declarations, re.M)
        enums[enum] = {name: int(number) for name, number in re.findall(r'^    (\w+) "\w+" = (\d+)$', body, re.M)}
    (body,) = re.findall(r"^ctypedef struct ncclConfig_t .*\n((?:    .*\n)+)", declarations, re.M)
    config = [list(field) for field in re.findall(r"^    (.*?) (\w+)$", body, re.M)]
    (size,) = re.findall(r"^ctypedef struct ncclUniqueId .*\n    char internal\[(\d+)\]", declarations, re.M)
    return {"functions": functions, "enums": enums, "config": config, "unique_id_bytes": int(size)}


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        (path,) = [one for one in metadata.files("nccl4py") or () if one.name == "cynccl.pxd"]
        package = f"nccl4py {metadata.version('nccl4py')}"
        _RECORD.write_text(json.dumps({"package": package, **_read(path.read_text())}, indent=1) + "\n")
    record: dict[str, Any] = json.loads(_RECORD.read_text())
    return record


def _kind(given: Any) -> str:
    """What a C type is in a call: a pointer, an int, a size, or a struct of its own."""
    if given is UniqueId or given == "ncclUniqueId":
        return "ncclUniqueId"
    if given in (ctypes.c_size_t, "size_t"):
        return "size_t"
    if given in (ctypes.c_int, "int", *_ENUMS):
        return "int"
    if given in (ctypes.c_uint, "unsigned int"):
        return "unsigned int"
    if isinstance(given, str):
        assert given.endswith("*") or given in ("ncclComm_t", "cudaStream_t"), given
    else:
        assert given in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(given, ctypes._Pointer), given
    return "pointer"


@pytest.mark.parametrize("function", _OURS)
def test_a_functions_parameters(function: str, declared: dict[str, Any]) -> None:
    result, *parameters = declared["functions"][function]
    assert [_kind(one) for one in _OURS[function]] == [_kind(one) for one in parameters]
    assert result == ("char*" if function in library._TEXTS else "ncclResult_t")


def test_numbers_of_results_dtypes_and_operations(declared: dict[str, Any]) -> None:
    enums = declared["enums"]
    numbers = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name[4:]).upper(): one for name, one in enums["ncclResult_t"].items()
    }
    del numbers["NUM_RESULTS"]
    assert {one.name: one.value for one in Result} == numbers
    assert {ours: enums["ncclDataType_t"][name] for name, ours in _DTYPES.items()} == REDUCIBLE
    assert {ours: enums["ncclRedOp_t"][name] for name, ours in _OPS.items()} == OPERATIONS
    assert enums["ncclScalarResidence_t"]["ncclScalarHostImmediate"] == HOST_SCALAR


def test_structs(declared: dict[str, Any]) -> None:
    """Ours is the beginning of that of later versions, which only add fields."""
    ours = [(name.replace("_", "").lower(), _kind(kind)) for name, kind in Config._fields_]
    theirs = [(name.lower(), _kind(kind)) for kind, name in declared["config"][: len(ours)]]
    assert ours == theirs
    assert ctypes.sizeof(UniqueId) == library.UNIQUE_ID_BYTES == declared["unique_id_bytes"]
