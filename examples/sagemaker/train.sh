#!/bin/bash
# The entry point of a SageMaker training job on any number of hosts, in place of distribution={"mpi": ...}: hvdrun on the
# first host starts the ranks of all of them over ssh. The image has to have sshd, and keys with which root comes from
# one host to the others.
#   SageMaker: entry_point="train.sh", source_dir with this file and train.py
hosts=($(python -c 'import json, os; print(*json.loads(os.environ["SM_HOSTS"]))'))
ready=/tmp/hvdkit-sagemaker.pid
mkdir -p /run/sshd
/usr/sbin/sshd 2>/dev/null || true # where one is running already

if [ "$SM_CURRENT_HOST" != "${hosts[0]}" ]; then
    sleep infinity &
    trap 'kill $!; exit 0' TERM
    echo $$ >"$ready"
    wait
fi

for host in "${hosts[@]:1}"; do
    until ssh -n -o ConnectTimeout=5 "$host" test -s "$ready" 2>/dev/null; do sleep 1; done
done
# SageMaker ends a job by SIGTERM, which is hvdrun's to pass on to all ranks; `wait` ends with a signal as well.
trap 'stopped=yes; if [ -n "$!" ]; then kill "$!" 2>/dev/null; else exit 143; fi' TERM
hvdrun python train.py "$@" &
stopped=yes
while [ -n "$stopped" ]; do
    stopped=
    wait "$!"
    status=$?
done
for host in "${hosts[@]:1}"; do
    ssh -n -o ConnectTimeout=5 "$host" "kill \$(cat $ready); rm $ready"
done
exit "$status"
