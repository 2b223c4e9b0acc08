#!/usr/bin/env bash
# The whole pipeline as one job:  pipeline.sh RUN [JOBS]
#   RUN   a run folder; what is finished in it is not repeated
#   JOBS  how many folds at once (1)
# `run_notebooks.py --executor slurm --one-job` submits it with the settings of site.conf; without SLURM: bash pipeline.sh RUN
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 1 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-1} / ${2:-1}))}"  # a fold's share of the job
fvc_run --resume "$1" --jobs "${2:-1}"
