#!/usr/bin/env bash
# Make the reports of this folder: bash benchmarks/reports/measure.sh DATASET OUT NAME...
# DATASET is HellaSwag's validation items as JSON Lines, OUT a folder, NAME one of the functions below.
# From the root of a clone, with pytest-llmgpu[deepspeed] installed.
set -u
dataset=$1 out=$2
shift 2

bench() {
  local name=$1
  shift
  echo "== $name: pytest benchmarks $*"
  # pytest's status is not ours: a case that is meant to fail is kept as well.
  python3 -m pytest benchmarks -q -p no:cacheprovider --llmgpu-json="$out/$name.json.gz" "$@" || echo "status $?"
}
dummy() {
  local name=$1 model=$2
  shift 2
  bench "$name" --llmgpu-model="$model" --llmgpu-load-format=dummy --llmgpu-dtype=float16 \
    --llmgpu-dataset="$dataset" --llmgpu-limit=60 "$@"
}
width_104() {
  python3 benchmarks/overhead/fixed_width.py "$out/w104.jsonl" --width 104 --items 64
  local name=$1 model=$2
  shift 2
  bench "$name" --llmgpu-model="$model" --llmgpu-load-format=dummy --llmgpu-dtype=float16 \
    --llmgpu-dataset="$out/w104.jsonl" "$@"
}

# 4 GPUs
30b() { dummy llama-30b-4xH200 llama-30b --strategy=mp,tp,iok; }
30b_no_p2p() { NCCL_P2P_DISABLE=1 dummy llama-30b-4xH200-no-p2p llama-30b --strategy=mp,tp,iok; }
30b_capped() {
  dummy llama-30b-4xH200-17.3GiB llama-30b --strategy=mp --llmgpu-gpu-memory=17.3GiB
  dummy llama-30b-4xH200-tp-18.1GiB llama-30b --strategy=tp --llmgpu-gpu-memory=18.1GiB \
    --llmgpu-batch-sizes=1,2,4,8,16,32,64,128
  # Loading takes more than the largest batch of the list: DeepSpeed makes each layer anew beside its old one.
  dummy llama-30b-4xH200-iok-22.4GiB llama-30b --strategy=iok --llmgpu-gpu-memory=22.4GiB \
    --llmgpu-batch-sizes=1,2,4,8,16,32,64,128
}
7b() { dummy llama-7b-4xH200 llama-7b --strategy=mp,tp,iok; }
speed() {
  width_104 w104-llama-30b-4xH200 llama-30b --strategy=mp,tp,iok --llmgpu-batch-sizes=1,64
  width_104 w104-llama-30b-4xH200-autotp llama-30b --strategy=tp --llmgpu-tp-backend=deepspeed --llmgpu-batch-sizes=1,64
  width_104 w104-llama-7b-4xH200 llama-7b --strategy=tp,iok --llmgpu-batch-sizes=1,64
  width_104 w104-llama-7b-4xH200-autotp llama-7b --strategy=tp --llmgpu-tp-backend=deepspeed --llmgpu-batch-sizes=1
}
mp_forward() { python3 benchmarks/overhead/mp_forward.py --dataset "$out/w104.jsonl" --limit 64 >"$out/mp_forward.json"; }

# 1 GPU
8b() {
  dummy llama-3-8b-1xH200 llama-3-8b --strategy=mp,iok --llmgpu-dtype=bfloat16 --llmgpu-devices=1
}
stock() { bench iok-stock-bundled-1xH200 --strategy=mp,iok --llmgpu-iok-stock --llmgpu-devices=1; }
clamped() { python3 benchmarks/reports/clamp.py "$out/iok-clamped-bundled-1xH200.json.gz" | tee "$out/clamp.jsonl"; }

for name in "$@"; do "$name"; done
