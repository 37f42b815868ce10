#!/bin/bash
# Written by hvdkit submit for PBS Professional and OpenPBS: qsub FILE runs it.
#PBS -S /bin/bash
#PBS -N train
# Chunks, and in each: cores (ncpus), ranks (mpiprocs; without it there would be one), GPUs, memory.
#PBS -l select=4:ncpus=8:mpiprocs=8
# One chunk a node.
#PBS -l place=scatter
#PBS -l walltime=02:00:00
# A lost node ends the job; PBS would start it once more, from the beginning.
#PBS -r n
# PBS begins with the environment of a login; -V brings that of qsub, with the Python that hvdrun is in.
#PBS -V
# What PBS itself has to say (time exceeded, for instance) comes here at the end.
#PBS -j oe

# PBS starts in the home folder.
cd "$PBS_O_WORKDIR" || exit 1
# PBS keeps output back until the end; this log grows while the job runs, and is added to if it runs again.
exec >>train-"${PBS_JOBID%%.*}".log 2>&1

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
