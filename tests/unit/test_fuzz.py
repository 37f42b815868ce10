"""Whatever a parser is given, it answers, or raises the error that it documents; and it does not take long over it.

Every public function of hvdkit that is called parse... is in a table, or REACHED says by which other one.
"""

from __future__ import annotations

import ast
import contextlib
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases import quick_ones
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdkit import config, handshake, launcher_channel, setting, world
from hvdkit.errors import ConfigError, HostfileError, HvdkitError, LaunchError, ProfileError, TransportError, WorldError
from hvdkit.gpu_vendors import VENDORS, Gpu, Vendor
from hvdkit.launch import plan_job
from hvdkit.launch.agent import host_info, rank_identity, stream
from hvdkit.launch.allocations import read_allocation, schedulers
from hvdkit.launch.cli import horovod
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.detect import launchers, mpi
from hvdkit.launch.elastic import host_pool
from hvdkit.launch.hostfiles import AUTO, DIALECTS, grammars, names, parsing
from hvdkit.launch.introspect import stack_report as doing
from hvdkit.launch.plan import network, registration, resources
from hvdkit.launch.state import control
from hvdkit.profiling import network as profiled
from hvdkit.tools import installed
from hvdkit.tools.doctor.checks import job as doctor_job
from hvdkit.tools.doctor.collect import host, software, vendor_gpus
from hvdkit.tools.doctor.collect import script as doctor_script
from hvdkit.tools.submit import job, kubernetes, scripts
from hvdkit.transport.gloo import rendezvous

ROOT = Path(__file__).parents[2] / "hvdkit"
EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

#: Of everything: numbers that are none, or too large, and letters that are no letters.
_ODD = [
    "",
    " ",
    "\n",
    "\t",
    "\0",
    "é",
    "²",
    "\uff11",
    "-1",
    "0",
    "00",
    "9" * 30,
    "9" * 5000,
    "1e999",
    "nan",
    "'",
    '"',
    "\\",
]
_HOSTS = [
    "n1",
    "n[1-3]",
    "n[01-10,12]",
    "[",
    "]",
    ":",
    "4",
    ",",
    "@",
    "#",
    "slots=2",
    "max_slots=",
    "=",
    "::1",
    "%",
    "-",
    "*",
]
_HOSTS += [
    "ppn=",
    "@x",
    "UNDEFINED",
    "<NULL>",
    "(x3)",
    "localhost",
    "/",
    ";",
    "$(id)",
    "Host",
    "[0-99999]",
    "[0-65535]",
]
_TIMES = ["1d", "2h", "30m", "5s", "01:02:03", "1-", "USR1", "@", ":", "A=", "="]
_SETTINGS = ["1", "true", "no", "4m", "64k", "1.5", "inf", "auto", "mpi", "-", "b"]


class Parser(NamedTuple):
    """What is fuzzed. words: that inputs are made of, beside any text. raises: what it documents."""

    call: Callable[[Any], object]
    words: list[str]
    raises: tuple[type[Exception], ...] = ()


def _variables(*known: str) -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(known), _texts([*_HOSTS, "2(x3),1", "pbs", "2", "4"]), max_size=8)


def _texts(words: list[str]) -> st.SearchStrategy[str]:
    piece = st.sampled_from([*words, *words, *_ODD]) | st.text(max_size=4)
    return st.lists(piece, max_size=10).map("".join)


def _in_file(read: Callable[[str], object]) -> Callable[[str], object]:
    def call(text: str) -> object:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
            file.flush()
            return read(file.name)

    return call


def _read_hostfile(format: str) -> Callable[[str], object]:
    return lambda text: parsing.parse_hostfile(text, "hosts", format)


TEXTS: dict[str, Parser] = {
    **{
        f"launch.hostfiles.parsing.parse_hostfile {name}": Parser(_read_hostfile(name), _HOSTS, (HostfileError,))
        for name in (AUTO, *DIALECTS)
    },
    "launcher_channel.parse_init_call": Parser(
        launcher_channel.parse_init_call, ["init", ":", "60.000", "0.000", "ready"]
    ),
    "launcher_channel.parse_totals": Parser(
        launcher_channel.parse_totals, ["totals", ":", "1", "2.0", "nan", "-1e999"]
    ),
    "launcher_channel.parse_value": Parser(launcher_channel.parse_value, ["value", ":", "0.5", "nan", "loss", "%2"]),
    "launch.hostfiles.parsing.find_hostfile": Parser(_in_file(parsing.find_hostfile), _HOSTS, (HostfileError,)),
    "launch.hostfiles.parsing.parse_host_list": Parser(parsing.parse_host_list, _HOSTS, (LaunchError,)),
    "launch.elastic.host_pool.parse_discovered": Parser(
        lambda text: host_pool.parse_discovered(text, "hosts.sh", None), _HOSTS, (LaunchError,)
    ),
    "launch.hostfiles.grammars.parse_numbered": Parser(grammars.parse_numbered, _HOSTS, (ValueError,)),
    "launch.allocations.schedulers.parse_idset": Parser(schedulers.parse_idset, _HOSTS, (ValueError,)),
    "launch.allocations.schedulers.parse_resources": Parser(
        schedulers.parse_resources,
        ['{"execution":{"R_lite":[', '{"rank":"0","children":{"core":"', '0-3"}}', "]", '"nodelist":["', '"]}', ","],
        (ValueError,),
    ),
    "launch.hostfiles.grammars.parse_lsf_pairs": Parser(grammars.parse_lsf_pairs, _HOSTS, (ValueError,)),
    "launch.hostfiles.grammars.parse_lsf_repeats": Parser(grammars.parse_lsf_repeats, _HOSTS, (ValueError,)),
    "launch.hostfiles.names.parse_hosts": Parser(names.parse_hosts, _HOSTS, (ValueError,)),
    "launch.hostfiles.names.parse_slots": Parser(lambda text: names.parse_slots("slots", text), _HOSTS, (ValueError,)),
    "launch.hostfiles.names.split_slots": Parser(names.split_slots, _HOSTS, (ValueError,)),
    "launch.hostfiles.grammars.parse_keyed": Parser(
        lambda text: grammars.parse_keyed(text, {"slots": "slots"}), _HOSTS, (ValueError,)
    ),
    "launch.hostfiles.names.expand": Parser(names.expand, _HOSTS, (ValueError,)),
    "launch.hostfiles.names.split_list": Parser(names.split_list, _HOSTS),
    "launch.hostfiles.names.fold": Parser(lambda text: names.fold(text.split(",")), _HOSTS),
    "launch.hostfiles.grammars.parse_assignment": Parser(grammars.parse_assignment, _HOSTS, (ValueError,)),
    "launch.hostfiles.grammars.parse_nodelist": Parser(grammars.parse_nodelist, _HOSTS, (ValueError,)),
    "world.parse_slurm_counts": Parser(world.parse_slurm_counts, ["2", "(x3)", ","], (ValueError,)),
    "tools.doctor.checks.job.parse_counts": Parser(doctor_job.parse_counts, ["2", "(x3)", ","]),
    "setting.parse_bool": Parser(setting.parse_bool, _SETTINGS, (ValueError,)),
    "setting.parse_bytes": Parser(setting.parse_bytes, _SETTINGS, (ValueError,)),
    "launch.plan.network.parse_wish": Parser(
        network.parse_wish, ["eth0", "10.0.0.0/24", ",", "/", "fe80::"], (LaunchError,)
    ),
    "launch.plan_job.split_words": Parser(lambda text: plan_job.split_words("-x", text), _HOSTS, (LaunchError,)),
    "launch.detect.mpi.parse_version": Parser(
        mpi.parse_version, ["mpirun (Open MPI) ", "5.0", "HYDRA", "Version: ", "Intel(R) "]
    ),
    "launch.detect.launchers.parse_pmi_list": Parser(launchers.parse_pmi_list, ["pmix", "_v", "4", "none", " "]),
    "launch.cli.horovod.read_flags": Parser(
        _in_file(horovod.read_flags),
        ["params:", "\n", "  ", "cycle-time-ms", ": ", "- ", "&a", "*a", "!!python/"],
        (LaunchError,),
    ),
    "tools.submit.job.parse_time": Parser(job.parse_time, _TIMES, (ValueError,)),
    "tools.submit.job.parse_warning": Parser(job.parse_warning, _TIMES, (ValueError,)),
    "tools.submit.job.parse_variable": Parser(job.parse_variable, _TIMES, (ValueError,)),
    **{
        f"{read.__module__.removeprefix('hvdkit.')}.{read.__name__}": Parser(
            read,
            [
                "JobState=",
                "FAILED",
                " ExitCode=",
                "1:9",
                "\n    Exit_status = ",
                "job_state = F",
                "EXIT ",
                '{"status":',
                "}",
                "[1]",
            ],
        )
        for read in (
            scripts.read_slurm_state,
            scripts.read_pbs_state,
            scripts.read_lsf_state,
            kubernetes.read_state,
        )
    },
    "tools.doctor.collect.software.parse_gpus": Parser(software.parse_gpus, ["0", ",", "GPU-1", "80 MiB", "\n"]),
    "tools.doctor.collect.host.parse_quota": Parser(host.parse_quota, ["max", " ", "150000"]),
    "tools.doctor.collect.script.read_script": Parser(
        _in_file(doctor_script.read_script), ["import torch\n", "if x:\n", "  ", "(", ")", "x"]
    ),
    "tools.installed.parse_numbers": Parser(installed.parse_numbers, ["2", ".", "+cpu", "rc1"]),
    "tools.installed.parse_torch_cuda": Parser(installed.parse_torch_cuda, ["cuda", " = ", "'12.1'", "\n"]),
    "tools.installed.parse_torch_other": Parser(installed.parse_torch_other, ["hip", "xpu", " = ", "'6.4'", "\n"]),
    "launch.agent.host_info.parse_cpus": Parser(host_info.parse_cpus, ["0", "-", ",", "0-999"]),
    "profiling.network.parse_network": Parser(profiled.parse_network, ["10", "gbit", ",", "30", "us"], (ProfileError,)),
    "launch.introspect.stack_report.parse_dump": Parser(
        doing.parse_dump, ['  File "x", line ', " in f", "Thread 0x1 (most):", "\n"]
    ),
}


def _select(vendor: Vendor, environ: dict[str, str]) -> object:
    return vendor.select(environ, _GPUS)


_GPUS = tuple(Gpu(number, f"0000:0{number}:00.0", uuid=f"GPU-{number}a") for number in range(3))
VARIABLES: dict[str, tuple[Callable[[Any], object], st.SearchStrategy[dict[str, str]], tuple[type[Exception], ...]]] = {
    "config.read_settings": (
        config.read_settings,
        st.dictionaries(
            st.sampled_from([one.variable for one in config.read_settings({})]), _texts(_SETTINGS), max_size=6
        ),
        (ConfigError,),
    ),
    "config.read_config": (
        config.read_config,
        st.dictionaries(
            st.sampled_from([one.variable for one in config.read_settings({})]), _texts(_SETTINGS), max_size=6
        ),
        (ConfigError,),
    ),
    "world.read_world": (
        world.read_world,
        _variables(
            *sorted({name for table in world._LAUNCHERS.values() for each in table.values() for name in each}),
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_JOB_ID",
        ),
        (WorldError,),
    ),
    **{
        f"gpu_vendors.{vendor.name}": (partial(_select, vendor), _variables(*vendor.variables), ())
        for vendor in VENDORS
    },
    "world.read_job": (world.read_job, _variables("HVDKIT_JOB"), ()),
    "launch.allocations.read_allocation": (
        read_allocation,
        _variables(
            *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS", "SLURM_JOB_CPUS_PER_NODE"),
            *(
                "PBS_NODEFILE",
                "PBS_JOBID",
                "LSB_JOBID",
                "LSB_MCPU_HOSTS",
                "LSB_HOSTS",
                "LSB_DJOB_HOSTFILE",
                "PE_HOSTFILE",
            ),
        ),
        (LaunchError,),
    ),
    "launch.agent.rank_identity.identify_rank": (
        rank_identity.identify_rank,
        _variables(
            *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE"),
            *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
        ),
        (),
    ),
    "transport.gloo.rendezvous.find_rendezvous_store": (
        lambda environ: rendezvous.find_rendezvous_store(environ, "torchrun"),
        _variables("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
        (WorldError,),
    ),
}

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def _objects(**good: Any) -> st.SearchStrategy[Any]:
    """Objects like a good one, with some of its fields something else, or gone."""
    fields = {name: st.just(value) | _JSON for name, value in good.items()}
    return st.fixed_dictionaries({}, optional=fields) | st.fixed_dictionaries(fields)


_PROCESS = {"pid": 1, "state": "S", "command": "", "stacks": doing.__doc__, "asked": True}
_MACHINE = {"allowed": [0], "cores": 1, "shared_mib": 5, "python": "3", "gpus": [["0000:07:00.0", "0-3"]]} | {
    "gpu_vendor": "AMD"
}
_AMD = _objects(gpu=0, asic={"market_name": "x"}, driver={"version": "6"})
MESSAGES: dict[str, tuple[Callable[[Any], object], st.SearchStrategy[Any], tuple[type[Exception], ...]]] = {
    "launch.plan.registration.parse_registration": (
        registration.parse_registration,
        _objects(
            rank=0, size=1, host="n", interfaces=[["eth0", "10.0.0.1", 24, 0]], address="10.0.0.1", machine=_MACHINE
        ),
        (ValueError,),
    ),
    "launch.plan.resources.parse_resources": (resources.parse_resources, _objects(**_MACHINE), (ValueError,)),
    "launch.plan.network.parse_interfaces": (
        network.parse_interfaces,
        _JSON
        | st.lists(st.tuples(st.just("eth0"), st.just("10.0.0.1") | _JSON, st.just(24) | _JSON, _JSON), max_size=2),
        (ValueError,),
    ),
    "launch.state.control.parse_start": (
        lambda value: control.parse_start(json.dumps(value).encode()),
        _objects(pid=1, threads=""),
        (ValueError,),
    ),
    "launch.state.control.parse_end": (
        lambda value: control.parse_end(json.dumps(value).encode()),
        _objects(code=0, signal=0, ended_by="", tail=["x"], time=0.5),
        (ValueError,),
    ),
    "launch.state.control.parse_stacks": (
        lambda value: control.parse_stacks(json.dumps(value).encode()),
        _objects(query=1, processes=[_PROCESS]),
        (ValueError,),
    ),
    "launch.introspect.stack_report.read_answer": (
        lambda value: doing.format_report(doing.read_answer(value)),
        _objects(job={"hosts": {"0": "n"}}, ranks={"0": [_PROCESS], "1": None}),
        (LaunchError,),
    ),
    "tools.doctor.collect.vendor_gpus.parse_amd_smi": (
        lambda value: vendor_gpus.parse_amd_smi(json.dumps(value)),
        st.lists(_AMD) | _objects(gpu_data=[{}]) | st.fixed_dictionaries({"gpu_data": st.lists(_AMD)}) | _JSON,
        (),
    ),
    "tools.doctor.collect.vendor_gpus.parse_xpu_smi": (
        lambda value: vendor_gpus.parse_xpu_smi(json.dumps(value)),
        _objects(device_list=[{"device_name": "x", "pci_bdf_address": "0000:18:00.0"}]) | _JSON,
        (),
    ),
    "transport.gloo.rendezvous.parse_rendezvous_info": (
        lambda value: rendezvous.parse_rendezvous_info(json.dumps(value).encode()),
        _objects(addresses=["10.0.0.1"], port=5, mark="x", secret=""),
        (TransportError,),
    ),
    "transport.gloo.rendezvous.parse_rank_info": (
        lambda value: rendezvous.parse_rank_info(json.dumps(value).encode()),
        _objects(host="n", machine="", address="", reached=""),
        (TransportError,),
    ),
    "launch.cli.horovod.write_flags": (
        lambda value: horovod.write_flags(value, "file"),
        _JSON | _objects(params={"fusion-threshold-mb": 3}, timeline=None, controller="mpi"),
        (LaunchError,),
    ),
    "launch.cli.options.parse_arguments": (
        parse_arguments,
        st.lists(
            st.sampled_from(["-np", "2", "-H", "--tcp", "--", "true", "-p", "--start-timeout"]) | _texts(_HOSTS),
            max_size=5,
        ),
        (HvdkitError, SystemExit),  # type: ignore[dict-item]
    ),
}

BYTES: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "launch.state.control.parse_report": (control.parse_report, (ValueError,)),
    "transport.gloo.rendezvous.parse_rendezvous_info": (rendezvous.parse_rendezvous_info, (TransportError,)),
    "transport.gloo.rendezvous.parse_rank_info": (rendezvous.parse_rank_info, (TransportError,)),
    "launch.agent.stream.Prefixer": (lambda data: stream.Prefixer(b"[0] ").feed(data), ()),
}

#: Reached through another one of the table.
REACHED = {
    "profiling.recordings.parse_facts": "read_recordings, of files that hvdkit profile has written",
    "profiling.recordings.parse_plan": "the same",
    "launch.state.control.parse_processes": "launch.state.control.parse_stacks",
    **dict.fromkeys(
        (
            "launch.hostfiles.names.parse_list",
            "launch.hostfiles.grammars.parse_single_name",
            "launch.hostfiles.grammars.parse_lsf_line",
            "launch.hostfiles.grammars.parse_sge_line",
            "launch.hostfiles.parsing.parse_hostfile",
        ),
        "launch.hostfiles.parsing.parse_hostfile, of each dialect",
    ),
}


def test_every_parser_is_fuzzed() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        found |= {
            f"{module}.{one.name}"
            for one in tree.body
            if isinstance(one, ast.FunctionDef) and one.name.startswith("parse")
        }
    known = {*TEXTS, *VARIABLES, *MESSAGES, *BYTES, *REACHED}
    assert not found - known, "put these into the table of their kind"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("number", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEXTS)
def test_any_text(name: str, number: int) -> None:
    parser = TEXTS[name]

    @settings(EXAMPLES, max_examples=number)
    @given(_texts(parser.words))
    def check(text: str) -> None:
        with contextlib.suppress(*parser.raises):
            parser.call(text)

    check()


#: Reads a file, then does what parse_hostfile does.
_READS = "launch.hostfiles.parsing.find_hostfile"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", quick_ones(TEXTS, *(name for name in list(TEXTS)[::4] if name != _READS)))
def test_a_long_text_takes_no_long_time(name: str) -> None:
    parser = TEXTS[name]
    for word in [*dict.fromkeys([*parser.words, *_ODD]), "[1]", "a[0-60000],", "[0-60000,", "1,", "(", "((((a", "- "]:
        with contextlib.suppress(*parser.raises):
            parser.call("n" + word * (20_000 // max(1, len(word))))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [*VARIABLES, *MESSAGES])
def test_any_variables_and_any_message(name: str) -> None:
    call, values, raises = VARIABLES[name] if name in VARIABLES else MESSAGES[name]

    @EXAMPLES
    @given(values)
    def check(value: Any) -> None:
        with contextlib.suppress(*raises):
            call(value)

    check()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", BYTES)
def test_any_bytes(name: str) -> None:
    call, raises = BYTES[name]

    @EXAMPLES
    @given(st.binary(max_size=40) | _texts(["[", "{", '"', ":", ",", "1", "\x1b", "[", ";", "\r"]).map(str.encode))
    def check(data: bytes) -> None:
        with contextlib.suppress(*raises):
            call(data)

    check()
    for piece in (b"[", b'{"a":', b"\x1b", b"\x1b[", b"\r", b"9", b"\x1b]0"):
        with contextlib.suppress(*raises):
            call(piece * (200_000 // len(piece)))


@pytest.mark.timeout(30)
def test_an_answer_that_is_no_ranks_proves_nothing() -> None:
    @EXAMPLES
    @given(st.binary(min_size=handshake.ANSWER_BYTES, max_size=handshake.ANSWER_BYTES))
    def check(answer: bytes) -> None:
        assert handshake.Challenge(b"secret", b"mesh").check(answer) is None

    check()
