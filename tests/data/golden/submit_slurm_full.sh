#!/bin/bash -l
# Written by hvdkit submit for Slurm: sbatch FILE runs it.
#SBATCH --job-name=digits
#SBATCH --nodes=2
# One task a rank, so one a GPU where there are GPUs.
#SBATCH --ntasks-per-node=4
#SBATCH --time=1-12:00:00
# Of each node, not of the job.
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=7
# Of each node.
#SBATCH --mem=64G
#SBATCH --account=lab
#SBATCH --partition=gpu
# Output and errors together; %x is the job's name and %j its id.
#SBATCH --output=logs/%x.%j
# A lost node or a preemption puts the job back into the queue, for 2 minutes at least, and runs this
# script again with SLURM_RESTART_COUNT set: the training has to find its own checkpoint.
#SBATCH --requeue
# The log is added to.
#SBATCH --open-mode=append
# B: is for this script alone. Without it Slurm signals steps too, mpirun's daemons among them, and they
# die of it. It may come up to a minute early.
#SBATCH --signal=B:USR1@300
#SBATCH --mail-type=BEGIN,END,FAIL,REQUEUE
#SBATCH --mail-user=me@site.org
#SBATCH -x y

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
# Slurm itself requeues what it preempts; what was cancelled is not to come back.
ended=''
trap 'ended=yes; pass_on TERM' TERM
# Slurm sends it to this script alone, about 300 seconds before the time is up.
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

# 75, by agreement with the training: saved, not finished. Slurm requeues none of itself.
[ "$status" -ne 75 ] || [ -n "$ended" ] || scontrol requeue "$SLURM_JOB_ID" || exit 1

exit "$status"
