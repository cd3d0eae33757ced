#!/usr/bin/env bash
# Tiny Shakespeare, softmax and SSA, three seeds stated in advance: bash results/shakespeare.sh PATH/TO/input.txt
# Some minutes a run (PYTHON=... names the interpreter); interrupted, it goes on where it was. Summaries: results/shakespeare/.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p results/shakespeare
for seed in 0 1 2; do
    for scorer in softmax ssa; do
        run="runs/shakespeare-$scorer-s$seed"
        "${PYTHON:-python}" train_gpt.py --preset=shakespeare --data="$1" --scorer=$scorer --seed=$seed --out="$run" --resume
        cp "$run/summary.json" "results/shakespeare/$scorer-s$seed.json"
    done
done
