"""Manifests for Kubernetes, in YAML: an MPIJob of Kubeflow's MPI Operator (v2beta1), a TrainJob of Trainer (v1alpha1).

A TrainJob refers to a runtime, which has the name of the job and all settings that depend on the image and the command.
Of the TrainJob's own fields only the numbers are used: which containers its image and command apply to differs between
versions of Trainer.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from hvdkit.errors import SubmitError
from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob, check_job

#: The file in which the MPI Operator and Kubeflow Trainer list the hosts, in Open MPI's format.
HOSTFILE = "/etc/mpi/hostfile"

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", re.ASCII)


def check_manifest(job: BatchJob, resource: str, success: str) -> None:
    """Raise SubmitError with all options that a manifest cannot express.

    resource: name of the resource for kubectl. success: its condition after success.
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
    """Write the resources of a container, and its shared memory, which its ranks use together."""
    amounts = {
        "cpu": job.cpus * job.tasks_per_node,
        "memory": f"{job.memory_unit}i" if job.memory else "",
        "nvidia.com/gpu": job.gpus,
    }
    limits = [f"    {name}: {quote(str(amount))}" for name, amount in amounts.items() if amount]
    lines = ["# Of each worker.", "resources:", "  limits:", *limits] if limits else []
    lines += [
        "# Ranks of a worker share memory; the default of a container is 64 MiB.",
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
    ]
    return _indent(lines, indent)


#: The pod's volume that `write_container` mounts.
SHARED_MEMORY = "volumes: [{name: shm, emptyDir: {medium: Memory}}]"


def quote(text: str) -> str:
    """Write a string in JSON's quotes, which are valid in YAML too."""
    return json.dumps(text)


def _literal(text: str) -> str:
    """Prevent Kubernetes from reading $(NAME) as a variable: it reads $$ as a dollar."""
    return text.replace("$", "$$")


def _indent(lines: list[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def write_mpijob(job: BatchJob) -> str:
    """Write the manifest. Raises SubmitError for options that an MPIJob cannot express."""
    check_manifest(job, "mpijob", "Succeeded")
    queue = f"\n    schedulingPolicy:\n      queue: {quote(job.queue)}" if job.queue else ""
    return f"""\
# Written by hvdkit submit for the MPI Operator of Kubeflow: kubectl create -f FILE runs it.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: {quote(job.name)}
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
    backoffLimit: {6 if job.requeue else 0}{queue}
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: {"OnFailure" if job.requeue else "Never"}
      template:
        spec:
          containers:
            - name: launcher
              image: {quote(job.image)}
              # The operator writes the list of workers and the ssh key.
              command: {write_command(job)}
{write_environ(job, 14)}\
    Worker:
      replicas: {job.nodes}
      template:
        spec:
          containers:
            - name: worker
              image: {quote(job.image)}
              # The image has to have sshd, this Python environment at the same path as the launcher, and the script.
              command: ["/usr/sbin/sshd", "-De"]
{write_container(job, 14)}\
          {SHARED_MEMORY}
"""


def read_state(text: str) -> State | None:
    """Read `kubectl get RESOURCE NAME -o json` of an MPIJob or a TrainJob; None for other text."""
    try:
        status = json.loads(text).get("status", {})
        conditions = [str(entry.get("type")) for entry in status.get("conditions", []) if entry.get("status") == "True"]
        # A TrainJob has no condition while it runs, and no jobs before.
        running = "Running" in conditions or any(
            job.get("active") for job in status.get("jobsStatus") or () if job.get("name") == "launcher"
        )
    except (ValueError, AttributeError, TypeError):
        return None
    for word, code in (("Failed", 1), ("Succeeded", 0), ("Complete", 0)):
        if word in conditions:
            return State("ended", word.lower(), code)
    return State("running", "running") if running else State("waiting", " ".join(conditions).lower() or "created")


KUBERNETES = Scheduler(
    title="Kubernetes",
    write=write_mpijob,
    submit=("kubectl", "create", "-f", "-", "-o", "name"),
    read_id=first_match(r"mpijob\.kubeflow\.org/([a-z0-9-]+)"),
    ask=lambda job: ("kubectl", "get", "mpijob", job, "-o", "json"),
    read_state=read_state,
    cancel=lambda job: ("kubectl", "delete", "mpijob", job),
    read_log=lambda job: ("kubectl", "logs", "--follow", f"job/{job}-launcher"),
    sees_files=False,
)


# Trainer's ssh key can be read by its group, which ssh refuses if the key's owner, root, uses it. So the pods run as a
# user whose group has the key, and sshd listens on a port that this user may open.
_USER = 1000
_HOME = "/home/mpiuser"
_PORT = 2222
_RULES = """
        # Not when its time is up: it would begin anew.
        rules: [{name: timeIsUp, action: FailJobSet, onJobFailureReasons: [DeadlineExceeded]}]"""


def write_trainjob(job: BatchJob) -> str:
    """Write both objects. Raises SubmitError for options that they cannot express."""
    check_manifest(job, "trainjob", "Complete")
    labels = f"\n  labels:\n    kueue.x-k8s.io/queue-name: {quote(job.queue)}" if job.queue else ""
    return f"""\
# Written by hvdkit submit for Kubeflow Trainer: kubectl create -f FILE runs it.
# Whoever may create no ClusterTrainingRuntime writes TrainingRuntime in its place, here and in runtimeRef below.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata:
  name: {quote(job.name)}
spec:
  mlPolicy:
    # Of the launcher; the TrainJob has the number of workers.
    numNodes: 1
    mpi:
      # Ranks of a worker.
      numProcPerNode: {job.tasks_per_node}
      mpiImplementation: OpenMPI
      sshAuthMountPath: {_HOME}/.ssh
      runLauncherAsNode: false
  template:
    spec:
      network:
        publishNotReadyAddresses: true
      # The launcher's end is the job's.
      successPolicy:
        operator: All
        targetReplicatedJobs: [launcher]
      # How often a job that failed is started again.
      failurePolicy:
        maxRestarts: {f"6{_RULES}" if job.requeue else 0}
      replicatedJobs:
        - name: node
          template:
            spec:
              backoffLimit: 0
              template:
                spec:
                  # The user of the image whose group may read the ssh key.
                  securityContext: {{fsGroup: {_USER}}}
                  containers:
                    - name: node
                      image: {quote(job.image)}
                      securityContext: {{runAsUser: {_USER}, runAsGroup: {_USER}}}
                      # The image has to have sshd and its configuration for this user, this Python environment at the
                      # same path as the launcher, and the script.
                      command: ["/usr/sbin/sshd", "-De", "-f", "{_HOME}/.sshd_config"]
                      readinessProbe:
                        tcpSocket: {{port: {_PORT}}}
{write_container(job, 22)}\
                  {SHARED_MEMORY}
        - name: launcher
          # Not before the workers can be reached: hvdrun looks up their names before it starts anything.
          dependsOn:
            - name: node
              status: Ready
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              backoffLimit: 0
              # Seconds; the job is ended then.
              activeDeadlineSeconds: {job.seconds}
              template:
                spec:
                  securityContext: {{fsGroup: {_USER}}}
                  containers:
                    - name: node
                      image: {quote(job.image)}
                      securityContext: {{runAsUser: {_USER}, runAsGroup: {_USER}}}
                      # Trainer writes the list of workers and the ssh key.
                      command: {write_command(job)}
{write_environ(job, 22)}\
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {quote(job.name)}{labels}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: ClusterTrainingRuntime
    name: {quote(job.name)}
  trainer:
    numNodes: {job.nodes}
    numProcPerNode: {job.tasks_per_node}
"""


TRAINJOB = replace(
    KUBERNETES,
    write=write_trainjob,
    read_id=first_match(r"trainjob\.trainer\.kubeflow\.org/([a-z0-9-]+)"),
    ask=lambda job: ("kubectl", "get", "trainjob", job, "-o", "json"),
    cancel=lambda job: ("kubectl", "delete", f"trainjob/{job}", f"clustertrainingruntime/{job}"),
    read_log=lambda job: ("kubectl", "logs", "--follow", f"job/{job}-launcher-0"),
)
