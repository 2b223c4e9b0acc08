#!/usr/bin/env bash
# The folds of one stage, one per task of an array job:  folds.sh RUN STAGE FOLD...
#   RUN    a run folder; what is finished in it is not repeated
#   STAGE  its name, for example 04_fold_training
#   FOLD   without SLURM these run one after another; a task of an array job runs the fold of its own number
# `run_notebooks.py --executor slurm` submits it with the settings of site.conf.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

run=$1 stage=$2
shift 2
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$SLURM_ARRAY_TASK_ID"
failed=0
for fold in "$@"; do
    fvc_run --resume "$run" --tasks "${stage}_fold_$fold"
    status=$?
    [ "$failed" != 0 ] || failed=$status
    # One fold's failure is not the others'; but who was asked to stop does not begin another.
    [ -z "$fvc_stop" ] || break
done
exit "$failed"
