#!/usr/bin/env bash
# Shards of some work, one per task of an array job:  shards.sh OF 'SHARD...' COMMAND...
#   OF       how many shards the files are dealt out to
#   SHARD    from 0; without SLURM these run one after another; a task of an array job runs the shard of its own number
#   COMMAND  of run_notebooks.py, with what says the shard left off its end: shard RUN 03_augmentation
# `run_notebooks.py --executor slurm` submits it with the settings of site.conf.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 3 ] || { sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

of=$1 shards=${SLURM_ARRAY_TASK_ID:-$2}
shift 2
failed=0
for shard in $shards; do
    # One that is killed, for memory or otherwise, goes on with what is missing; what killed it twice it does alone.
    for _ in {1..8}; do
        fvc_run "$@" "$shard/$of"
        status=$?
        [ "$status" = 137 ] || [ "$status" = 139 ] || [ "$status" = 134 ] || break
        [ -z "$fvc_stop" ] || break
        fvc_say "$* $shard/$of was killed ($status) and begins again"
    done
    [ "$failed" != 0 ] || failed=$status
    [ -z "$fvc_stop" ] || break
done
exit "$failed"
