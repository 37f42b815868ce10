#!/bin/bash
# Written by hvdkit submit for LSF: bsub < FILE runs it (the < matters, or these lines are not read).
#BSUB -J train
# Ranks of the whole job, and how many of them go on a node.
#BSUB -n 32
#BSUB -R "span[ptile=8]"
# Hours and minutes.
#BSUB -W 02:00
# LSF adds its report to the log at the end; %J is the job's id.
#BSUB -o train-%J.log
# A lost node ends the job, also in a queue that would start it once more.
#BSUB -rn

# LSF keeps output back until the end; this way the log grows while the job runs.
exec >>train-"$LSB_JOBID".log 2>&1

command -v hvdrun >/dev/null || {
    echo "hvdrun is not on PATH on $(hostname): give hvdkit submit --venv DIR, or --module M" >&2
    exit 127
}

# bash runs a trap only between commands or during wait: so hvdrun runs beside the script, which waits.
job='' told='' early=''
pass_on() {
    told=yes
    if [ -n "$job" ]; then kill -s "$1" "$job" 2>/dev/null; elif [ "$early" != TERM ]; then early=$1; fi
}
# The end is near (cancelled, preempted, requeued, out of time): hvdrun ends all ranks, on every node; those
# that have a handler for it save first.
# At the time limit LSF sends USR2, and kills the job ten minutes later.
trap 'pass_on TERM' TERM USR2

# Where and how many ranks, hvdrun reads from the allocation.
hvdrun python train.py &
job=$!
[ -z "$early" ] || kill -s "$early" "$job" # a signal came before its number was known
while
    told=''
    wait "$job"
    status=$?
    [ -n "$told" ] # a trap ends wait early: then wait again
do :; done

exit "$status"
