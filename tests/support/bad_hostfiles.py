"""Hostfiles that are refused, with what the error names of them; the messages are in tests/data/launch_errors.txt."""

#: Dialect -> texts and how their errors begin: the file, the line and the word.
BAD_HOSTFILES: dict[str, list[tuple[str, str]]] = {
    "openmpi": [
        ("a slots=1\nb port=22", "hosts:2: 'port=22'"),
        ("a:4", "hosts:1: 'a:4'"),
        ("rank 0=a slot=1", "hosts:1: 'rank 0=a slot=1'"),
        ("^a", "hosts:1: '^a'"),
        ("+n1", "hosts:1: '+n1'"),
        ("a slots=4 slots=5", "hosts:1: slots"),
        ("slots=4", "hosts:1: 'slots=4'"),
        ("a sockets=2", "hosts:1: 'sockets=2'"),
    ],
    "horovod": [
        ("a", "hosts:1: 'a'"),
        ("a slots=1 max_slots=2", "hosts:1: 'max_slots=2'"),
    ],
    "hydra": [
        ("a:x", "hosts:1: slots='x'"),
        ("a slots=4", "hosts:1: 'slots=4'"),
        ("a:4 user=-l", "hosts:1: '-l'"),
        ("::1:4:5:6:7:8:9:10:11:12", "hosts:1: '::1:4:5:6:7:8:9:10:11:12'"),
    ],
    "intel": [
        ("a:4", "hosts:1: 'a:4'"),
    ],
    "machinefile": [
        ("a:0", "hosts:1: slots='0'"),
    ],
    "pbs": [
        ("a slots=4", "hosts:1: 'a slots=4'"),
        ("a\nb:4", "hosts:2: 'b:4'"),
    ],
    "lsf": [
        ("a 4 b", "hosts:1: 'a 4 b'"),
        ("LSB_MCPU_HOSTS=a x", "hosts:1: the number of a='x'"),
        ("LSB_QUEUE=gpu", "hosts:1: LSB_QUEUE"),
    ],
    "slurm": [
        ("n[1-", "hosts:1: 'n[1-'"),
        ("n1,,n2", "hosts:1: 'n1,,n2'"),
        ("SLURM_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=4(x2)", "hosts:2: SLURM_TASKS_PER_NODE='4(x2)'"),
        ("SLURM_NODELIST=n1\nSLURM_TASKS_PER_NODE=4(y2)", "hosts:2: SLURM_TASKS_PER_NODE='4(y2)'"),
        ("SLURM_NODELIST=n[1-2]\nSLURM_TASKS_PER_NODE=0(x2)", "hosts:2: SLURM_TASKS_PER_NODE='0(x2)'"),
        ("n1\nSLURM_NTASKS_PER_NODE=many", "hosts:2: SLURM_NTASKS_PER_NODE='many'"),
    ],
    "sge": [
        ("a", "hosts:1: 'a'"),
        ("a x q UNDEFINED", "hosts:1: slots='x'"),
    ],
    "deepspeed": [
        ("a", "hosts:1: 'a'"),
        ("a slots=1\na slots=2", "hosts:2: a"),
    ],
    "kubernetes": [
        ("#!/bin/sh\necho $HOSTS", "hosts:2: '$HOSTS'"),
    ],
    "plain": [
        ("a\na", "hosts:2: a"),
    ],
}
