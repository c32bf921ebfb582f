#!/bin/bash
# Measure every GPU of this machine with torchrun: one process per GPU.
#
#   ./torchrun.sh                  # GEMMs of 8192 x 8192 x 8192
#   ./torchrun.sh --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k
#
# For several machines, run it on each of them with TORCHRUN_OPTIONS="--nnodes 4 --rdzv-endpoint HOST:29500 --rdzv-backend c10d
# --nproc-per-node 8" in a folder that they share, and gather once at the end.
set -euo pipefail

if [ $# -eq 0 ]; then
  set -- --shapes 8k
fi
runs=${RUNS:-$PWD/gemmscope-fleet}
read -r -a options <<< "${TORCHRUN_OPTIONS:---standalone --nproc-per-node gpu}"

# gemmscope is not a Python file, hence --no-python. torchrun ends all processes as soon as one fails.
torchrun "${options[@]}" --no-python gemmscope fleet "$@" --folder "$runs"

gemmscope fleet "$runs" --json "$runs.json" --fail-if-outlier
