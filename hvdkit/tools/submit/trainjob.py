"""A job as a TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) and the runtime that it names, in YAML.

The runtime has the name of the job, and all that depends on the image and the command. Of the TrainJob's own fields
only the numbers are used: which containers its image and command apply to differs between versions of Trainer.
"""

from __future__ import annotations

from hvdkit.tools.submit.follow import Scheduler, State, first_match
from hvdkit.tools.submit.job import BatchJob
from hvdkit.tools.submit.kubernetes import (
    SHARED_MEMORY,
    check_manifest,
    quote,
    read_state,
    write_command,
    write_container,
    write_environ,
)

# Trainer's ssh key can be read by its group, which ssh refuses for the key's owner, root. So the pods run as a user
# whose group has it, and sshd listens at a port that this user may open.
_USER = 1000
_HOME = "/home/mpiuser"
_PORT = 2222
_RULES = """
        # Not when its time is up: it would begin anew.
        rules: [{name: timeIsUp, action: FailJobSet, onJobFailureReasons: [DeadlineExceeded]}]"""


def write_manifest(job: BatchJob) -> str:
    """Write both objects. Raises SubmitError for what they have no place for."""
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


def read_trainjob_state(text: str) -> State | None:
    """Read the status of `kubectl get trainjob NAME -o json`."""
    return read_state(
        text,
        "Complete",
        lambda _, status: any(job["name"] == "launcher" and job.get("active") for job in status["jobsStatus"]),
    )


TRAINJOB = Scheduler(
    title="Kubernetes",
    write=write_manifest,
    submit=("kubectl", "create", "-f", "-", "-o", "name"),
    read_id=first_match(r"trainjob\.trainer\.kubeflow\.org/([a-z0-9-]+)"),
    ask=lambda job: ("kubectl", "get", "trainjob", job, "-o", "json"),
    read_state=read_trainjob_state,
    cancel=lambda job: ("kubectl", "delete", f"trainjob/{job}", f"clustertrainingruntime/{job}"),
    read_log=lambda job: ("kubectl", "logs", "--follow", f"job/{job}-launcher-0"),
)
