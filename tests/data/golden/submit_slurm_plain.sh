#!/bin/bash
# Written by hvdkit submit for Slurm: sbatch FILE runs it.
#SBATCH --job-name=train
#SBATCH --nodes=4
# One task a rank, so one a GPU where there are GPUs.
#SBATCH --ntasks-per-node=8
#SBATCH --time=02:00:00
# Output and errors together; %x is the job's name and %j its id.
#SBATCH --output=%x-%j.log
# A lost node ends the job; most sites would start it once more, from the beginning.
#SBATCH --no-requeue

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
trap 'pass_on TERM' TERM

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
