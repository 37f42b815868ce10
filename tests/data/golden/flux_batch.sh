#!/bin/bash
# Written by hvdkit submit for Flux: flux batch FILE runs it.
# flux: --job-name=digits
# A slot is a whole node.
# flux: --nodes=3 --nslots=3 --exclusive
# Of each node.
# flux: --gpus-per-slot=4
# Of each node.
# flux: --cores-per-slot=28
# flux: --time-limit=5400s
# flux: --bank=lab
# flux: --queue=gpu
# Output and errors together.
# flux: --output=digits-{{id}}.log
# flux: --dependency=afterok:1234

source '/home/me/my venv/bin/activate' || exit 1

# hvdrun takes these to every rank.
export NCCL_DEBUG=INFO

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
hvdrun --slots-per-host 4 --verbose python train.py --name 'two words' &
job=$!
[ -z "$early" ] || kill -s "$early" "$job" # a signal came before its number was known
while
    told=''
    wait "$job"
    status=$?
    [ -n "$told" ] # a trap ends wait early: then wait again
do :; done

exit "$status"
