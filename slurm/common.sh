# shellcheck shell=bash
# What the batch scripts share; they source it. Under plain bash the same, without the requeueing.
#
# fvc_run OPTION...  runs `run_notebooks.py OPTION...` and returns its exit code. SIGUSR1 (from --signal, before the time
# limit) and SIGTERM (scancel, preemption) reach this shell alone and are passed on: the run saves its state and leaves
# with 75. After SIGUSR1 the job then puts itself into the queue again, this array task and no other, and goes on from
# there; so it does where a training lost one of its nodes, which leaves with 75 and no signal at all. After SIGTERM it
# does not: who cancelled it meant it, and a job that was preempted SLURM requeues itself.

set -u
FVC_HOME=${FVC_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
FVC_SITE=${FVC_SITE:-$FVC_HOME/slurm/site.conf}
MAX_REQUEUES=20 SETUP='' PYTHON=''
# shellcheck source=site.conf
source "$FVC_SITE" || exit 2
MAX_REQUEUES=${MAX_REQUEUES:-20}
if ! [[ $MAX_REQUEUES =~ ^[0-9]+$ ]]; then
    echo "$FVC_SITE: MAX_REQUEUES: got '$MAX_REQUEUES', wanted a number" >&2
    exit 2
fi
if [ -z "$PYTHON" ]; then
    PYTHON=${FVC_PYTHON:-$FVC_HOME/.venv/bin/python}
    [ -x "$PYTHON" ] || PYTHON=python3
fi
fvc_program=("$FVC_HOME/run_notebooks.py")
[ -f "$FVC_HOME/run_notebooks.py" ] || fvc_program=(-P -m fvc_lib.command_line.program) # installed from a wheel
# Not every cluster keeps a job to its processors, and torch takes all that it sees.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # since SLURM 22.05 srun does not take it from the job
fi

fvc_say() {
    printf 'fvc %s %s: %s\n' "$(date +%FT%T)" "${SLURM_JOB_ID:+job $SLURM_JOB_ID on ${SLURMD_NODENAME:-this node}}" "$*" >&2
}

fvc_run() {
    local status
    if [ -n "$fvc_stop" ]; then # it came before there was anything to save
        [ "$fvc_stop" != USR1 ] || fvc_requeue
        return 75
    fi
    "$PYTHON" "${fvc_program[@]}" "$@" &
    fvc_child=$!
    # A signal ends `wait` early; the child's own exit code is what the wait says that none interrupted.
    while :; do
        fvc_interrupted=''
        wait "$fvc_child"
        status=$?
        [ -n "$fvc_interrupted" ] || break
    done
    fvc_child=''
    if [ "$status" = 75 ] && { [ -z "$fvc_stop" ] || [ "$fvc_stop" = USR1 ]; }; then
        fvc_requeue
    fi
    return "$status"
}

# Pass on the first signal only: to the run a second one means "now", and costs what it has not saved yet.
fvc_on_signal() {
    fvc_interrupted=1
    if [ -n "$fvc_stop" ]; then
        # Cancelled while it saves before its time limit: then it shall stay away. At the limit itself TERM comes, too.
        if [ "$1" = TERM ] && [ "$SECONDS" -lt $((${FVC_TIME_SECONDS:-999999999} - 5)) ]; then
            fvc_stop=TERM
        fi
        return 0
    fi
    fvc_stop=$1
    fvc_say "SIG$1: the run saves its state and leaves"
    [ -z "$fvc_child" ] || fvc_forward "$1"
}

# Python dies of a signal for which it has no handler yet, or no more; /proc says whether it has.
fvc_forward() {
    local bit handled
    bit=$(($(kill -l "$1") - 1))
    for _ in {1..600}; do
        handled=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$fvc_child/status" 2>/dev/null)
        if [ -z "$handled" ] || (((0x$handled >> bit) & 1)); then
            break
        fi
        sleep 0.1
    done
    kill -s "$1" "$fvc_child" 2>/dev/null
}

fvc_requeue() {
    local id=${SLURM_JOB_ID:-} restarts=${SLURM_RESTART_COUNT:-0} answer
    [ -n "$id" ] || return 0
    # A task's own job id would do, but that of the first task is the whole array's.
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    if [ "$restarts" -ge "$MAX_REQUEUES" ]; then
        fvc_say "$id was started again $restarts times, and MAX_REQUEUES is $MAX_REQUEUES ($FVC_SITE): not requeued." \
            "Everything is saved; submit again to go on."
        return 0
    fi
    trap '' TERM # requeueing ends what runs, this shell included
    fvc_say "requeues itself as $id (started again $restarts times of at most $MAX_REQUEUES)"
    if ! answer=$(scontrol requeue "$id" 2>&1); then
        fvc_say "scontrol requeue $id: $answer. Everything is saved; submit again to go on."
    fi
}

# What waits for this job to end well begins when it has ended. A job in which the system killed a worker for memory SLURM
# calls OUT_OF_MEMORY, though its stages are done, and would cancel all that waits for it.
fvc_let_go() {
    local id=${SLURM_JOB_ID:-} job waits
    [ -n "$id" ] || return 0
    squeue --noheader --user="$(id -un)" --states=PENDING --format='%F|%E' 2>/dev/null | sort -u | grep -E "afterok:$id\b" |
        while IFS='|' read -r job waits; do
            waits=$(sed -E "s/\([a-z]*\)|_\*//g; s/afterok:$id\b/afterany:$id/g" <<<"$waits")
            scontrol update "JobId=$job" "Dependency=$waits" >&2
        done
    return 0
}

fvc_child='' fvc_stop='' fvc_interrupted=''
trap 'fvc_on_signal USR1' USR1
trap 'fvc_on_signal TERM' TERM
trap 'fvc_interrupted=1 fvc_stop=INT' INT # the terminal sends Ctrl-C to the run as well
if [ -n "$SETUP" ]; then
    eval "$SETUP" || { fvc_say "SETUP of $FVC_SITE failed: $SETUP"; exit 2; }
fi
