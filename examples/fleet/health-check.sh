#!/bin/bash
# Check the GPUs of this node before a job: call it in the prolog of a Slurm job, in an init container, or before torchrun.
#
#   ./health-check.sh && torchrun ... train.py
#   ./health-check.sh --step --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k --pp 4
#
# Exits with 0 if all GPUs were measured and none is slow, and with 1 otherwise. Takes about a minute.
set -uo pipefail

if [ $# -eq 0 ]; then
  set -- --shapes 8k --recipes fp8current --time-limit 20
fi
report=${REPORT:-$(mktemp -t gemmscope-health-XXXXXX).json}

gemmscope fleet "$@" --gpus all --json "$report" --fail-if-outlier
case $? in
  0) exit 0 ;;
  3) echo "$(hostname): a GPU is slow, or was not measured: gemmscope report $report" >&2 ;;
  *) echo "$(hostname): the GPUs could not be checked" >&2 ;;
esac
exit 1
