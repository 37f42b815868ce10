"""A job as an MPIJob for Kubeflow's MPI Operator (kubeflow.org/v2beta1), in YAML."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hvdkit.tools.submit.job import BatchJob
from hvdkit.tools.submit.manifest import (
    SHARED_MEMORY,
    check_manifest,
    quote,
    write_command,
    write_container,
    write_environ,
)
from hvdkit.tools.submit.scheduler import Scheduler, State, first_match


def write_manifest(job: BatchJob) -> str:
    """Write the manifest. Raises SubmitError for what an MPIJob has no place for."""
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


def read_state(text: str, success: str, runs: Callable[[list[str], Any], bool]) -> State | None:
    """Read `kubectl get RESOURCE NAME -o json`; None for other text.

    success: the condition of a job that has succeeded. runs: whether one that has not ended runs, from the conditions
    that are true and its status; KeyError, TypeError and AttributeError mean that it does not.
    """
    try:
        status = json.loads(text).get("status", {})
        conditions = [str(entry.get("type")) for entry in status.get("conditions", []) if entry.get("status") == "True"]
    except (ValueError, AttributeError, TypeError):
        return None
    for word, code in (("Failed", 1), (success, 0)):
        if word in conditions:
            return State("ended", word.lower(), code)
    try:
        running = runs(conditions, status)
    except (KeyError, AttributeError, TypeError):  # it has no jobs yet
        running = False
    return State("running", "running") if running else State("waiting", " ".join(conditions).lower() or "created")


def read_mpijob_state(text: str) -> State | None:
    """Read the status of `kubectl get mpijob NAME -o json`."""
    return read_state(text, "Succeeded", lambda conditions, _: "Running" in conditions)


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
