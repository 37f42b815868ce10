#!/bin/bash -l
# Written by hvdkit submit for LSF: bsub < FILE runs it (the < matters, or these lines are not read).
#BSUB -J digits
# Ranks of the whole job, and how many of them go on a node.
#BSUB -n 8
#BSUB -R "span[ptile=4]"
# Hours and minutes.
#BSUB -W 36:00
# Of each node.
#BSUB -gpu "num=4"
# Cores of each rank.
#BSUB -R "affinity[core(7)]"
# Of each node.
#BSUB -R "rusage[mem=64GB/host]"
#BSUB -P lab
#BSUB -q gpu
# LSF adds its report to the log at the end; %J is the job's id.
#BSUB -o logs/digits.%J
# A lost node or a preemption runs this script again: the training has to find its own checkpoint.
#BSUB -r
# So does this exit code, by agreement with the training: saved, not finished.
#BSUB -Q "75"
# In hours and minutes before the time is up.
#BSUB -wa USR1
#BSUB -wt 00:05
# At its beginning and end.
#BSUB -B
#BSUB -N
#BSUB -u me@site.org
#BSUB -x y

# LSF keeps output back until the end; this way the log grows while the job runs.
exec >>logs/digits."$LSB_JOBID" 2>&1

# Modules, as at a login. A node begins without those that were loaded where this was submitted.
module load gcc/12 || exit 1
module load cuda || exit 1

source '/home/me/my venv/bin/activate' || exit 1

# hvdrun takes these to every rank.
export NCCL_DEBUG=INFO
export TITLE='it'"'"'s $HOME'

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
# LSF sends it, maybe to hvdrun as well, about 300 seconds before the time is up.
# hvdrun passes it to every rank, which saves and ends. A program without a handler for it dies of it.
trap 'pass_on USR1' USR1

# Where and how many ranks, hvdrun reads from the allocation.
hvdrun python train.py --name 'two words' &
job=$!
[ -z "$early" ] || kill -s "$early" "$job" # a signal came before its number was known
while
    told=''
    wait "$job"
    status=$?
    [ -n "$told" ] # a trap ends wait early: then wait again
do :; done

exit "$status"
