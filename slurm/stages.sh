#!/usr/bin/env bash
# Some stages of a run, one after another, as one job:  stages.sh RUN STAGE...
#   RUN    a run folder; what is finished in it is not repeated
#   STAGE  their names, for example 01_data_index 02_folds 03_augmentation
# `run_notebooks.py --executor slurm` submits it, with the settings of site.conf, for the stages before and after the folds.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 2 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

run=$1
shift
keys=$(IFS=,; printf '%s' "$*")
fvc_run --resume "$run" --tasks "$keys"
status=$?
[ "$status" != 0 ] || fvc_let_go
exit "$status"
