#!/usr/bin/env bash
# In-context learning: the runs behind results/icl, their seeds stated in advance.
#
#     bash results/icl.sh             what was run
#     bash results/icl.sh "mixed"     one of the lines below that were not run, by a word in it
#
# Interrupted, it goes on where it was. PYTHON=... names the interpreter. Weights stay in runs/, numbers go to results/icl/.
set -euo pipefail
cd "$(dirname "$0")/.."
ALL=ssa,softmax,temperature,sparsemax,entmax15,sa_softmax,cosformer,hardmax

run=(
    "--preset=small --task=every --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=linear --compare=ssa,softmax --seeds=0,1"
    "--preset=laptop --task=every --compare=$ALL"
)
not_run=(
    "--preset=small --task=every --labels=running --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=every --law=iid --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=every --positions=none --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=every --positions=random-offset --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=every --attention-only --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=every --no-norm --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=some --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=mixed --compare=ssa,softmax --seeds=0,1"
    "--preset=small --task=every --compare=$ALL --seeds=0,1"
    "--preset=paper --task=every --compare=ssa,softmax"
    "--preset=paper --task=linear --compare=ssa,softmax"
)

if [ $# -eq 0 ]; then chosen=("${run[@]}"); else mapfile -t chosen < <(printf '%s\n' "${not_run[@]}" | grep -- "$1"); fi
for flags in "${chosen[@]}"; do
    "${PYTHON:-python}" train_icl.py $flags --results=results/icl --resume
done
if [ $# -eq 0 ]; then  # two small models for the notebooks
    for scorer in ssa softmax; do
        mkdir -p "results/icl/checkpoints/small-every-$scorer-s0"
        cp "runs/train_icl-small-every-final/$scorer-s0/"{config.json,model.safetensors} "results/icl/checkpoints/small-every-$scorer-s0"
    done
fi
