#!/bin/bash -l
# Written by hvdkit submit for PBS Professional and OpenPBS: qsub FILE runs it.
#PBS -S /bin/bash
#PBS -N digits
# Chunks, and in each: cores (ncpus), ranks (mpiprocs; without it there would be one), GPUs, memory.
#PBS -l select=2:ncpus=28:mpiprocs=4:ngpus=4:mem=64gb
# One chunk a node.
#PBS -l place=scatter
#PBS -l walltime=36:00:00
#PBS -A lab
#PBS -q gpu
# A lost node or a preemption runs this script again: the training has to find its own checkpoint.
#PBS -r y
# At its beginning, end and abortion.
#PBS -m abe
#PBS -M me@site.org
# What PBS itself has to say (time exceeded, for instance) comes here at the end.
#PBS -j oe
#PBS -x y

# PBS starts in the home folder.
cd "$PBS_O_WORKDIR" || exit 1
# PBS keeps output back until the end; this log grows while the job runs, and is added to if it runs again.
exec >>logs/digits."${PBS_JOBID%%.*}" 2>&1

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
trap 'pass_on TERM' TERM
# It is sent below, about 300 seconds before the time is up.
# hvdrun passes it to every rank, which saves and ends. A program without a handler for it dies of it.
trap 'pass_on USR1' USR1

# PBS gives no warning, so the script sends itself one.
(sleep 129300 && kill -s USR1 $$) 2>/dev/null &
clock=$!
trap 'pkill -P "$clock"' EXIT

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

# 75, by agreement with the training: saved, not finished. Only operators may requeue (qrerun).
[ "$status" -ne 75 ] || echo "Saved, not finished: submit the job again to go on." >&2

exit "$status"
