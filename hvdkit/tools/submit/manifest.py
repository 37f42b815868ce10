"""What manifests for Kubernetes have in common: quoting, variables, resources, and the options that they lack."""

from __future__ import annotations

import json
import re

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.job import BatchJob, check_job

#: Where the MPI Operator and Kubeflow Trainer put the list of hosts, in Open MPI's dialect.
HOSTFILE = "/etc/mpi/hostfile"

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", re.ASCII)


def check_manifest(job: BatchJob, resource: str, success: str) -> None:
    """Raise SubmitError with everything that a manifest has no place for.

    resource: as kubectl names it. success: its condition after success.
    """
    check_job(job, "")
    problems = []
    if not job.image:
        problems.append("--scheduler k8s needs --image NAME, an image with Python, hvdkit, an MPI, sshd and the script")
    if not _LABEL.fullmatch(job.name):
        problems.append(
            f"--job-name {job.name!r}: Kubernetes takes lowercase letters, digits and -, a letter first, at most 52"
        )
    for flag, given, instead in (
        ("--module", job.modules, "build it into the image"),
        ("--venv", job.venv, "build it into the image, with its bin in PATH"),
        ("--account", job.account, "use a namespace: kubectl config set-context --current --namespace N"),
        ("--signal", job.warning, "Kubernetes sends none; save regularly, and give --requeue"),
        (
            "--dependency",
            job.dependencies,
            f"wait for the other job: kubectl wait --for=condition={success} {resource}/NAME",
        ),
        ("--mail", job.mail, f"watch the job with kubectl get {resource} -w"),
        ("--output", job.output if job.output != BatchJob.output else "", "kubectl logs has the output"),
    ):
        if given:
            problems.append(f"{flag} has no meaning on Kubernetes: {instead}")
    if problems:
        raise SubmitError("; ".join(problems) + ".")


def write_command(job: BatchJob) -> str:
    """Write the launcher's command, hvdrun with the job's, as a list in JSON."""
    words = ("hvdrun", "--hostfile", HOSTFILE, *job.hvdrun_words)
    return json.dumps([_literal(word) for word in words])


def write_environ(job: BatchJob, indent: int) -> str:
    """Write the launcher's variables, if there are any."""
    if not job.environ:
        return ""
    lines = ["# hvdrun takes these to every rank.", "env:"]
    for name, value in job.environ.items():
        lines += [f"  - name: {name}", f"    value: {quote(_literal(value))}"]
    return _indent(lines, indent)


def write_container(job: BatchJob, indent: int) -> str:
    """Write the resources and the shared memory of a container whose ranks share memory."""
    amounts = {"cpu": str(job.cpus * job.tasks_per_node) if job.cpus else "", "memory": ""}
    if job.memory:
        amounts["memory"] = job.memory_unit + "i"
    amounts["nvidia.com/gpu"] = str(job.gpus) if job.gpus else ""
    amounts = {name: amount for name, amount in amounts.items() if amount}
    lines = []
    if amounts:
        lines += ["# Of each worker.", "resources:", "  limits:"]
        lines += [f"    {name}: {quote(amount)}" for name, amount in amounts.items()]
    lines += [
        "# Ranks of a worker share memory; the default of a container is 64 MiB.",
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
    ]
    return _indent(lines, indent)


#: The volume that `write_container` mounts, of its pod.
SHARED_MEMORY = "volumes: [{name: shm, emptyDir: {medium: Memory}}]"


def quote(text: str) -> str:
    """Write a string in JSON's quotes, which are YAML's too."""
    return json.dumps(text)


def _literal(text: str) -> str:
    """Keep Kubernetes from reading $(NAME) as a variable: to it $$ is a dollar."""
    return text.replace("$", "$$")


def _indent(lines: list[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)
