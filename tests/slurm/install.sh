#!/usr/bin/env bash
# A real Slurm for the tests, where this may be installed; else says what is missing. The tests skip what they lack.
set -u
missing=()
for program in munged slurmctld slurmd sbatch; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    if apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge >/dev/null; then
        exit 0
    fi
    echo "slurm-wlm and munge could not be installed: the tests that need a real Slurm will be skipped"
else
    echo "missing: ${missing[*]}; the tests that need a real Slurm will be skipped (Debian: apt-get install slurm-wlm munge)"
fi
exit 0
