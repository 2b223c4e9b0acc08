#!/usr/bin/env bash
# The shards of one stage, one per task of an array job:  shards.sh RUN STAGE OF SHARD...
#   RUN    a run folder
#   STAGE  01_data_index, 03_augmentation or 03b_forensic_features
#   OF     how many shards its files are dealt out to
#   SHARD  from 0; without SLURM these run one after another; a task of an array job runs the shard of its own number
# `run_notebooks.py --executor slurm` submits it with the settings of site.conf.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 3 ] || { sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

run=$1 stage=$2 of=$3
shift 3
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$SLURM_ARRAY_TASK_ID"
failed=0
for shard in "$@"; do
    # One that is killed, for memory or otherwise, goes on with what is missing; what killed it twice it does alone.
    for _ in {1..8}; do
        fvc_run shard "$run" "$stage" "$shard/$of"
        status=$?
        [ "$status" = 137 ] || [ "$status" = 139 ] || [ "$status" = 134 ] || break
        [ -z "$fvc_stop" ] || break
        fvc_say "shard $shard of $stage was killed ($status) and begins again"
    done
    [ "$failed" != 0 ] || failed=$status
    [ -z "$fvc_stop" ] || break
done
exit "$failed"
