#!/bin/sh
# Record rows for 1, 2, 4 and 8 GPUs: three shapes, short and long prompts. Usage: record_ranks.sh FOLDER [GPUS...]
set -eu
folder=$1
shift
mkdir -p "$folder"
here=$(dirname "$0")
[ $# -gt 0 ] || set -- 1 2 4 8
for count in "$@"; do
  for shape in laneformer-2b-as-llama llama-3.2-1b llama-3.1-8b; do
    for tokens in 128 2048; do
      soloist bench decode --shape "$here/shapes/$shape.json" --precision bf16 --prompt-tokens "$tokens" \
        --new-tokens 256 --gpus "$count" -o "$folder/$shape-$tokens-$count.json"
    done
  done
  soloist bench accuracy --shape "$here/shapes/llama-3.2-1b.json" --precision bf16 --repeats 200 \
    --gpus "$count" -o "$folder/accuracy-$count.json"
done
