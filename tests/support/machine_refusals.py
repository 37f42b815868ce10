"""What the launcher refuses of a machine: files, programs, schedulers, sockets. A call for each place that raises."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hvdkit.integrations import ranks as workers
from hvdkit.launch import start
from hvdkit.launch.allocations import read_allocation, schedulers
from hvdkit.launch.cli.horovod import read_flags, write_flags
from hvdkit.launch.detect import command, hosts, mpi
from hvdkit.launch.elastic import host_pool
from hvdkit.launch.elastic.host_pool import Discovery
from hvdkit.launch.elastic.options import find_discovered
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.hostfiles.parsing import read_text
from hvdkit.launch.introspect.metrics import MetricsServer
from hvdkit.launch.introspect.query_server import query_job
from hvdkit.launch.introspect.stack_report import read_answer
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan import registration
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.network import HostInterfaces
from hvdkit.launch.prepare import read_ssh_options
from hvdkit.launch.process import ProcessResult
from hvdkit.launch.state import authenticated_server, runtime_dir
from hvdkit.launch.state.ranks import Ranks
from hvdkit.tools import hosts as hosts_command
from hvdkit.tools import jobs, training_command

FLUX = {"FLUX_URI": "local:///flux", "PATH": "."}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "8"}
CONDOR = {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "3"}
ENTRIES = {"controller": "pigeon", "params": {"speed": 9, "torus_allreduce": 3, "cycle_time_ms": [1]}, "x": {}}
NP = training_command.HvdrunOption("np", ("-np", "2"))


@dataclass
class Machine:
    """A machine for one call: its working directory is empty, and what it lacks is replaced by `patch`."""

    patch: pytest.MonkeyPatch

    def write(self, name: str, text: str = "", mode: int = 0o644) -> str:
        Path(name).write_text(text)
        Path(name).chmod(mode)
        return name

    def make(self, name: str, mode: int = 0o755) -> str:
        Path(name).mkdir()
        Path(name).chmod(mode)
        return name

    def ending(self, module: Any, status: int, output: str) -> None:
        """Let every program that `module` runs end with this status and output, on stderr if it fails."""
        result = ProcessResult(status, "" if status else output, output if status else "", 5)
        self.patch.setattr(module, "run_program", lambda *args, **options: result)

    def failing(self, where: Any, name: str, error: BaseException) -> None:
        def fail(*args: Any, **options: Any) -> NoReturn:
            raise error

        self.patch.setattr(where, name, fail, raising=False)


def oserror(number: int, name: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), name)


def check(*words: str, module: bool = False) -> None:
    command.check_command(words, module=module, path="bin")


def read(environ: Mapping[str, str]) -> object:
    return read_allocation(environ)


def flux(machine: Machine, status: int, output: str) -> object:
    machine.write("flux", mode=0o755)
    machine.ending(schedulers, status, output)
    return read(FLUX)


def condor(machine: Machine, text: str) -> object:
    return read({**CONDOR, "CONDOR_CONTACT_FILE": machine.write("contact", text)})


def discover(machine: Machine, status: int | None, output: bytes = b"", error: BaseException | None = None) -> object:
    async def end(*_: Any, **options: Any) -> tuple[int | None, bytes]:
        if error:
            raise error
        return status, output

    machine.patch.setattr(host_pool, "_run", end)
    return asyncio.run(Discovery(machine.write("./hosts.sh", mode=0o755), None, {}).find_hosts())


def wait_for_slots(machine: Machine) -> object:
    async def end(*_: Any, **options: Any) -> tuple[int, bytes]:
        return 0, b"node1:2\n"

    machine.patch.setattr(host_pool, "_run", end)
    script = machine.write("./hosts.sh", mode=0o755)
    return find_discovered(LaunchOptions(np=3, host_discovery_script=script, elastic_timeout=0), {}, lambda line: None)


def find_script(machine: Machine, words: str) -> object:
    machine.write("text")
    return host_pool.split_script(words, "bin")


def plan_start_orders(machine: Machine) -> object:
    machine.patch.setattr(registration, "find_unplanned", lambda names: ["SECRET"])
    ranks = {rank: registration.Registration(rank, 3, "node1", HostInterfaces(())) for rank in range(3)}
    return registration.plan_start_orders(ranks, Job(command=("true",), ranks=3))


def in_removed_directory(machine: Machine) -> None:
    machine.patch.chdir(machine.make("gone"))
    os.rmdir(os.getcwd())
    command.check_working_directory()


def unreadable(machine: Machine) -> None:
    machine.write("train.py")
    machine.failing(command, "open", oserror(errno.EACCES, "train.py"))
    check("train.py")


def without_address(machine: Machine) -> object:
    machine.patch.setattr(hosts, "resolve", lambda name: ())
    machine.patch.setattr(hosts, "_ssh_settings", lambda login: {})
    machine.patch.setattr(socket, "gethostname", lambda: "login1")
    return hosts.find_addresses([Host("node1", 2)])


def listen(machine: Machine, number: int) -> object:
    machine.failing(authenticated_server, "_bind_one", oserror(number))
    return authenticated_server._bind(["10.0.0.1", "10.1.0.1"])


def open_metrics(machine: Machine) -> object:
    machine.failing(socket, "create_server", oserror(errno.EADDRINUSE))
    return asyncio.run(MetricsServer(Ranks(3), dict).open(9100, print))


def write_logs(machine: Machine) -> object:
    folder = machine.write("file") + "/logs"
    nothing: Any = None
    job = Job(command=("true",), ranks=3, variables={"HVDKIT_OUTPUT_DIRECTORY": folder})
    return start._build_runner(job, nothing, nothing, nothing, nothing)


def make_runtime_directory(machine: Machine) -> object:
    machine.patch.setattr(runtime_dir, "PLACES", ("first", "second"))
    machine.patch.setattr(runtime_dir, "_name_folder", lambda: "hvdkit-1000-0a1b2c3d")
    return runtime_dir.RuntimeDirectory()


def open_folder(machine: Machine) -> None:
    machine.patch.setattr(runtime_dir, "_name_user", lambda uid: "alice (1000)")
    runtime_dir._check(machine.make("open"))


def package(machine: Machine) -> None:
    machine.write(machine.make("model") + "/__init__.py")
    check("model", module=True)


def find_mpi(machine: Machine, status: int, output: str) -> object:
    machine.ending(mpi, status, output)
    machine.patch.setattr(mpi, "_search", lambda path, embedded: iter([Path("/opt/bin/mpirun")]))
    return mpi.find_mpi({"HOME": "/"}, "none")


def find_no_mpi(machine: Machine) -> object:
    machine.patch.setattr(mpi, "_search", lambda path, embedded: iter(()))
    return mpi.find_mpi({}, "none")


def program_on_path(machine: Machine) -> None:
    machine.write(machine.make("bin") + "/tool")
    check("tools")


def default_slots(machine: Machine) -> object:
    return read({"I_MPI_HYDRA_HOST_FILE": machine.write("hosts", "node1\n"), "I_MPI_PERHOST": "some"})


def sge(machine: Machine) -> object:
    file = machine.write("pe_hostfile", "a.site 4 all.q@a.site <NULL>\nb.site 2 all.q@b.site <NULL>\n")
    return read({"PE_HOSTFILE": file, "JOB_ID": "7", "NHOSTS": "3"})


def select_job(machine: Machine, name: str | None, *running: str) -> str:
    answer = {"job": {"size": 3, "command": "python train.py"}}
    machine.patch.setattr(jobs, "query_job", lambda folder, what: answer)
    return jobs.select_job("hvdkit stacks", name, {each: f"/{each}" for each in running})


def show_stacks(machine: Machine) -> None:
    answer = {"job": {"name": "4711", "size": 3}, "ranks": {}}
    machine.patch.setattr(jobs, "find_jobs", lambda: {"4711": "/4711"})
    machine.patch.setattr(jobs, "query_job", lambda folder, what: answer)
    jobs.show_stacks(argparse.Namespace(job=None, json=False))


def stop(machine: Machine) -> None:
    machine.patch.setattr(jobs, "find_jobs", lambda: {"4711": "/4711"})
    machine.patch.setattr(jobs, "stop_job", lambda folder, now: None)
    jobs.stop(argparse.Namespace(job="4711", now=False))


def find_no_hosts(machine: Machine) -> object:
    machine.patch.setattr(hosts_command, "read_environment", dict)
    options = {"hosts": None, "file": None, "format": "auto", "slots_per_host": None}
    return hosts_command._find(argparse.Namespace(**options))


def not_text(machine: Machine) -> object:
    Path("hosts").write_bytes(b"node1\xff\xfe slots=1")
    return read_text("hosts")


OFFER = workers.Offer(4, "node1", "10.0.0.2", 2004)
#: Code -> calls that raise LaunchError with it.
CASES: dict[str, list[Callable[[Machine], object]]] = {
    "address-not-usable": [lambda m: listen(m, errno.EACCES)],
    "bug-start-orders": [plan_start_orders],
    "command-empty": [lambda m: check("")],
    "command-unreadable": [unreadable],
    "config-file-entries": [lambda m: write_flags(ENTRIES, "config.yaml")],
    "config-file-unreadable": [lambda m: read_flags("config.yaml")],
    "config-file-without-sections": [lambda m: write_flags([1], "config.yaml")],
    "discovery-script-failed": [lambda m: discover(m, 3)],
    "discovery-script-missing": [lambda m: find_script(m, "./hosts.sh")],
    "discovery-script-not-executable": [lambda m: find_script(m, "./text")],
    "discovery-script-not-started": [lambda m: discover(m, 0, error=oserror(errno.ENOEXEC, "./hosts.sh"))],
    "discovery-script-output": [
        lambda m: discover(m, 0, b"node1:2\n-oProxy=x:1\nnode3:four\n"),
        lambda m: discover(m, 0, b"node1\n"),
    ],
    "discovery-script-quotes": [lambda m: find_script(m, "'")],
    "discovery-script-too-much-output": [lambda m: discover(m, 0, b"x" * (host_pool._LONGEST + 1))],
    "discovery-script-too-slow": [lambda m: discover(m, None)],
    "discovery-too-few-slots": [wait_for_slots],
    "exit-code-unknown": [stop],
    "flux-failed": [lambda m: flux(m, 3, "flux: no such command\n")],
    "flux-missing": [lambda m: read(FLUX)],
    "flux-output": [lambda m: flux(m, 0, '{"version": 1}')],
    "function-args-invalid": [lambda m: workers.check_call(max, 10, None)],
    "function-kwargs-invalid": [lambda m: workers.check_call(max, (), [1])],
    "function-not-callable": [lambda m: workers.check_call(3, None, None)],
    "hosts-missing": [find_no_hosts],
    "hostfile-invalid": [lambda m: read_text("hosts"), not_text, lambda m: read_text("ho\0sts")],
    "htcondor-contact": [lambda m: condor(m, "0 a 22\n1 -x 22\n"), lambda m: condor(m, "a 22\n")],
    "htcondor-contact-file": [lambda m: read({**CONDOR, "CONDOR_CONTACT_FILE": "contact"})],
    "htcondor-no-contacts": [lambda m: condor(m, "")],
    "htcondor-not-first-node": [lambda m: read({**CONDOR, "_CONDOR_PROCNO": "2"})],
    "hvdrun-option-invalid": [lambda m: training_command.split_command(["hvdrun", "-np", "0", "a"], [])],
    "identity-file-missing": [lambda m: read_ssh_options(None, "key")],
    "identity-file-name": [lambda m: read_ssh_options(None, m.write("my key"))],
    "job-does-not-answer": [lambda m: query_job("4711", "job")],
    "job-not-selected": [lambda m: select_job(m, None, "4711", "4712"), lambda m: select_job(m, "3", "4711")],
    "job-of-another-version": [lambda m: read_answer({"job": None})],
    "launcher-given-twice": [lambda m: training_command.split_command(["mpirun", "-np", "2", "a"], [NP])],
    "launcher-option": [lambda m: training_command.split_command(["mpirun", "--map-by", "core", "a"], [])],
    "lsf-hosts": [lambda m: read({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b"})],
    "lsf-no-hosts": [lambda m: read({"LSB_JOBID": "7"})],
    "metrics-port-in-use": [open_metrics],
    "module-missing": [lambda m: check("qqqqq", module=True)],
    "module-without-main": [package],
    "mpi-failed": [lambda m: find_mpi(m, 127, "No such file or directory")],
    "mpi-missing": [find_no_mpi],
    "mpi-unknown": [lambda m: find_mpi(m, 0, "Megaflop Runner 3\n")],
    "no-job-runs": [lambda m: select_job(m, None)],
    "no-own-address": [without_address],
    "no-port-free": [lambda m: listen(m, errno.EADDRINUSE)],
    "no-rank-started": [show_stacks],
    "no-runtime-directory": [make_runtime_directory],
    "output-directory-unusable": [write_logs],
    "program-in-directory": [lambda m: check(m.write("tool"))],
    "program-is-directory": [lambda m: check("./" + m.make("tool"))],
    "program-missing": [lambda m: check("./" + m.write("tool") + "s")],
    "program-not-executable": [lambda m: check("./" + m.write("tool"))],
    "program-not-on-path": [program_on_path],
    "runtime-directory-unsafe": [open_folder],
    "sagemaker-gpus": [lambda m: read({**SAGEMAKER, "SM_NUM_GPUS": "all"})],
    "sagemaker-host": [lambda m: read({**SAGEMAKER, "SM_CURRENT_HOST": "algo-7"})],
    "sagemaker-hosts": [
        lambda m: read({**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"}),
        lambda m: read({**SAGEMAKER, "SM_HOSTS": "[]"}),
        lambda m: read({**SAGEMAKER, "SM_HOSTS": '["algo-1", "algo-1"]'}),
        lambda m: read({**SAGEMAKER, "SM_HOSTS": '["-oProxyCommand=x"]'}),
    ],
    "sagemaker-interface": [lambda m: read({**SAGEMAKER, "SM_NETWORK_INTERFACE_NAME": "eth0;x"})],
    "sagemaker-not-first-host": [lambda m: read({**SAGEMAKER, "SM_CURRENT_HOST": "algo-2"})],
    "script-missing": [lambda m: check("my_" + m.write("train.py"))],
    "sge-hosts-differ": [sge],
    "slots-variable": [default_slots],
    "slurm-hosts": [
        lambda m: read({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}),
        lambda m: read({**SLURM, "SLURM_JOB_NODELIST": "n1;reboot"}),
        lambda m: read({**SLURM, "SLURM_TASKS_PER_NODE": "four"}),
        lambda m: read({**SLURM, "SLURM_TASKS_PER_NODE": "4(x3)"}),
    ],
    "started-by-flux-run": [lambda m: read({**FLUX, "FLUX_JOB_ID": "f2gnzHbW", "FLUX_JOB_SIZE": "4"})],
    "started-by-srun": [lambda m: read({**SLURM, **STEP, "SLURM_STEP_NUM_TASKS": "3"})],
    "store-address-invalid": [lambda m: workers.plan_variables([], "node1", 70000, "", "job")],
    "workers-not-numbered": [lambda m: workers.assign_ranks([OFFER, OFFER])],
    "working-directory-removed": [in_removed_directory],
}
