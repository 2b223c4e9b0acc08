#!/usr/bin/env bash
# One command that goes on where it was stopped, as a job:  command.sh COMMAND...
#   COMMAND  of run_notebooks.py: predict MODEL PATH... --out FOLDER
# `run_notebooks.py predict --executor slurm` submits it with the settings of site.conf.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 1 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

fvc_run "$@"
