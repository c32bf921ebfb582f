#!/bin/bash
# Measure every GPU of a running Ray cluster, as a Ray job.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 ./ray-job.sh --shapes 8k
#
# The command runs on the head node, where gemmscope[ray] must be installed. The other nodes need torch and Transformer Engine or
# torchao; gemmscope itself is sent to them. On the head node, `gemmscope fleet --shapes 8k --ray auto` does the same without a job.
set -euo pipefail

if [ $# -eq 0 ]; then
  set -- --shapes 8k
fi
ray job submit -- gemmscope fleet "$@" --ray auto --detail
