#!/usr/bin/env bash
# The whole pipeline as one job:  pipeline.sh RUN [JOBS]
#   RUN   a run folder; what is finished in it is not repeated
#   JOBS  how many folds at once (1)
# `run_notebooks.py --executor slurm --one-job` submits it with the settings of site.conf; without SLURM: bash pipeline.sh RUN
# A fold's share of the job's processors; where there is no job the runner deals them out.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / ${2:-1}))}"
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 1 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

fvc_run --resume "$1" --jobs "${2:-1}"
