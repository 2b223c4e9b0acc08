#!/usr/bin/env bash
#SBATCH --job-name=fvc
#SBATCH --nodes=1
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
# The whole pipeline as one job:  pipeline.sh RUN [JOBS], or pipeline.sh OPTION...
#   RUN     a run folder; what is finished in it is not repeated
#   JOBS    how many folds at once (1)
#   OPTION  of run_notebooks.py, for example -p corpus ~/videos: a new run, experiment job_ID; none: the sample corpus
#           (not -p runs_dir, nor in a file of parameters: FVC_RUNS_DIR names the runs folder)
# Without SLURM: bash pipeline.sh RUN
# Straight through, in the checkout: USE_MLOPS_PIPELINE=false sbatch --mem=8G slurm/pipeline.sh [OPTION...]
here=$(dirname "${BASH_SOURCE[0]}")
[ -f "$here/common.sh" ] || here=${FVC_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}/slurm # what sbatch is given it runs as a copy elsewhere
jobs=1
case ${1:--} in -*) ;; *) jobs=${2:-1} ;; esac
# A fold's share of the job's processors; where there is no job the runner deals them out.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / jobs))}"
# shellcheck source=common.sh
source "$here/common.sh" || exit 2

case ${1:--} in
-*)
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        case " $* " in *" runs_dir "*)
            fvc_say "-p runs_dir: not in a job, which looks for its run in FVC_RUNS_DIR when it is requeued; set that"
            exit 2 ;;
        esac
        set -- "$@" --experiment "job_$SLURM_JOB_ID"
        runs=$FVC_HOME/runs
        [ -f "$FVC_HOME/run_notebooks.py" ] || runs=$PWD/runs # installed from a wheel
        # A job that was requeued goes on with the run that it began; straight, it would train from the start again.
        if compgen -G "${FVC_RUNS_DIR:-$runs}/job_$SLURM_JOB_ID/run_*/run.json" >/dev/null; then
            set -- --resume latest "$@"
            export USE_MLOPS_PIPELINE=true
        fi
    fi
    fvc_run "$@"
    ;;
*) fvc_run --resume "$1" --jobs "$jobs" ;;
esac
