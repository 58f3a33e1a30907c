#!/usr/bin/env bash
# Runs an experiment in the folder RUN, or resumes it where that holds a run: the same command after every interruption.
#
#   run_or_resume.sh RUN [EXPERIMENT.yaml] [SECTION.KEY=VALUE]...
set -euo pipefail
run=${1:?"usage: run_or_resume.sh RUN [EXPERIMENT.yaml] [SECTION.KEY=VALUE]..."}
shift
if [ -n "${RAY_JOB_CONFIG_JSON_ENV_VAR:-}" ] && [ "${run#/}" = "$run" ]; then
    run=$HOME/$run # as cfl-ray takes it: the working directory of a submitted job is deleted with the job
fi
if [ -f "$run/config.yaml" ]; then
    exec cfl-ray resume "$run"
fi
exec cfl-ray run --run-dir "$run" "$@"
