#!/usr/bin/env bash
# BabyBERTa at laptop size on a quarter of AO-CHILDES, SSA and softmax, two seeds stated in advance, then Zorro:
#     bash results/babyberta.sh SENTENCES.txt TOKENIZER.json WIKIPEDIA.csv ZORRO_FOLDER
# Some ten minutes a run on a core of its own (PYTHON=... names the interpreter, THREADS=... the threads); interrupted, it goes
# on where it was. Summaries, metrics and Zorro's results: results/babyberta/.
set -euo pipefail
cd "$(dirname "$0")/.."
sentences="$1" tokenizer="$2" wikipedia="$3" zorro="$4"
python="${PYTHON:-python}"
mkdir -p results/babyberta
runs=()
for seed in 0 1; do
    for scorer in ssa softmax; do
        name="$scorer-s$seed"
        run="runs/babyberta-$name"
        "$python" train_babyberta.py --preset=laptop --data="$sentences" --tokenizer="$tokenizer" --ood="$wikipedia" \
            --scorer=$scorer --seed=$seed --threads="${THREADS:-1}" --out="$run" --resume
        cp "$run/summary.json" "results/babyberta/$name.json"
        cp "$run/config.json" "results/babyberta/$name-config.json"
        # every tenth step, and all evaluations
        "$python" -c 'import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    if "val_loss" in line or json.loads(line)["step"] % 10 == 0: print(line, end="")' "$run/metrics.jsonl" \
            > "results/babyberta/$name-metrics.jsonl"
        runs+=("$run")
    done
done
all="$(IFS=,; echo "${runs[*]}")"
"$python" eval.py zorro "$all" --sentences="$zorro" --threads="${THREADS:-1}" --out=results/babyberta
"$python" eval.py zorro "$all" --sentences="$zorro" --threads="${THREADS:-1}" --scoring=mlm --limit=200 --out=results/babyberta/mlm
