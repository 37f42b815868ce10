"""A job as an MPIJob for Kubeflow's MPI Operator (kubeflow.org/v2beta1), in YAML."""

from __future__ import annotations

import json
import re

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.job import BatchJob, check_job
from hvdkit.tools.submit.scheduler import Scheduler, State, first_match

#: Where the operator puts the list of workers, in Open MPI's dialect.
HOSTFILE = "/etc/mpi/hostfile"

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", re.ASCII)


def write_manifest(job: BatchJob) -> str:
    """Write the manifest. Raises SubmitError for what an MPIJob has no place for.

    Strings are in JSON's quotes, which are YAML's too.
    """
    check_job(job, "")
    _refuse(job)
    worker = "\n".join(_write_worker(job))
    return f"""\
# Written by hvdkit submit for the MPI Operator of Kubeflow: kubectl create -f FILE runs it.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: {_quote(job.name)}
spec:
  # Ranks of a worker.
  slotsPerWorker: {job.tasks_per_node}
  mpiImplementation: OpenMPI
  # Not before the workers can be reached: hvdrun looks up their names before it starts anything.
  launcherCreationPolicy: WaitForWorkersReady
  runPolicy:
    # The launcher's pod stays, with its log.
    cleanPodPolicy: Running
    # Seconds; the job is ended then.
    activeDeadlineSeconds: {job.seconds}
    # How often a launcher that failed is started again.
    backoffLimit: {6 if job.requeue else 0}{_write_queue(job)}
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: {"OnFailure" if job.requeue else "Never"}
      template:
        spec:
          containers:
            - name: launcher
              image: {_quote(job.image)}
              # The operator writes the list of workers and the ssh key.
              command: {json.dumps([_literal(word) for word in ("hvdrun", "--hostfile", HOSTFILE, *job.hvdrun_words)])}
{_write_environ(job)}\
    Worker:
      replicas: {job.nodes}
      template:
        spec:
          containers:
            - name: worker
              image: {_quote(job.image)}
              # The image has to have sshd, this Python environment at the same path as the launcher, and the script.
              command: ["/usr/sbin/sshd", "-De"]
{worker}
"""


def _refuse(job: BatchJob) -> None:
    problems = []
    if not job.image:
        problems.append("--scheduler k8s needs --image NAME, an image with Python, hvdkit, an MPI, sshd and the script")
    if not _LABEL.fullmatch(job.name):
        problems.append(f"--job-name {job.name!r}: Kubernetes takes lowercase letters, digits and -, at most 52")
    for flag, given, instead in (
        ("--module", job.modules, "build it into the image"),
        ("--venv", job.venv, "build it into the image, with its bin in PATH"),
        ("--account", job.account, "use a namespace: kubectl config set-context --current --namespace N"),
        ("--signal", job.warning, "Kubernetes sends none; save regularly, and give --requeue"),
        (
            "--dependency",
            job.dependencies,
            "wait for the other job: kubectl wait --for=condition=Succeeded mpijob/NAME",
        ),
        ("--mail", job.mail, "watch the job with kubectl get mpijob -w"),
        ("--output", job.output if job.output != BatchJob.output else "", "kubectl logs has the output"),
    ):
        if given:
            problems.append(f"{flag} has no meaning on Kubernetes: {instead}")
    if problems:
        raise SubmitError("; ".join(problems) + ".")


def _write_queue(job: BatchJob) -> str:
    return f"\n    schedulingPolicy:\n      queue: {_quote(job.queue)}" if job.queue else ""


def _write_environ(job: BatchJob) -> str:
    if not job.environ:
        return ""
    lines = ["              # hvdrun takes these to every rank.", "              env:"]
    for name, value in job.environ.items():
        lines += [f"                - name: {name}", f"                  value: {_quote(_literal(value))}"]
    return "\n".join(lines) + "\n"


def _write_worker(job: BatchJob) -> list[str]:
    amounts = {"cpu": str(job.cpus * job.tasks_per_node) if job.cpus else "", "memory": ""}
    if job.memory:
        amounts["memory"] = job.memory_unit + "i"
    amounts["nvidia.com/gpu"] = str(job.gpus) if job.gpus else ""
    amounts = {name: amount for name, amount in amounts.items() if amount}
    lines = []
    if amounts:
        lines += ["              # Of each worker.", "              resources:", "                limits:"]
        lines += [f"                  {name}: {_quote(amount)}" for name, amount in amounts.items()]
    return [
        *lines,
        "              # Ranks of a worker share memory; the default of a container is 64 MiB.",
        "              volumeMounts: [{name: shm, mountPath: /dev/shm}]",
        "          volumes: [{name: shm, emptyDir: {medium: Memory}}]",
    ]


def _literal(text: str) -> str:
    """Keep Kubernetes from reading $(NAME) as a variable: to it $$ is a dollar."""
    return text.replace("$", "$$")


def _quote(text: str) -> str:
    return json.dumps(text)


def read_mpijob_state(text: str) -> State | None:
    """Read the status of `kubectl get mpijob NAME -o json`."""
    try:
        conditions = json.loads(text).get("status", {}).get("conditions", [])
    except (ValueError, AttributeError):
        return None
    true = [str(entry.get("type")) for entry in conditions if entry.get("status") == "True"]
    for word, code in (("Failed", 1), ("Succeeded", 0)):
        if word in true:
            return State("ended", word.lower(), code)
    return State("running", "running") if "Running" in true else State("waiting", " ".join(true).lower() or "created")


KUBERNETES = Scheduler(
    title="Kubernetes",
    write=write_manifest,
    submit=("kubectl", "create", "-f", "-", "-o", "name"),
    read_id=first_match(r"mpijob\.kubeflow\.org/([a-z0-9-]+)"),
    ask=lambda job: ("kubectl", "get", "mpijob", job, "-o", "json"),
    read_state=read_mpijob_state,
    cancel=lambda job: ("kubectl", "delete", "mpijob", job),
    read_log=lambda job: ("kubectl", "logs", "--follow", f"job/{job}-launcher"),
)
