#!/usr/bin/env bash
# All checks that need a GPU, in one call of under ten minutes; writes results/gpu.md.
#
#   bench/gpu.sh [--device cuda] [--out FILE]
#
# It runs from the checkout, without installing: torch, numpy and the few packages of pyproject.toml
# must be importable by $PYTHON (python3). On a machine without a GPU, --device cpu runs the same
# checks on the CPU, to try the script itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="src:bench${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec timeout 570 "${PYTHON:-python3}" bench/gpu.py "$@"
