#!/usr/bin/env bash
# Make the reports of this folder: bash benchmarks/reports/measure.sh DATASET OUT NAME...
# DATASET is HellaSwag's validation items as JSON Lines, OUT a folder, NAME one of the functions below.
# From the root of a clone, with '.[deepspeed]' installed.
set -u
dataset=$1 out=$2
shift 2

bench() {
  local name=$1
  shift
  echo "== $name: pytest benchmarks $*"
  # The status of pytest is not the status of this script: a case that is expected to fail is kept as well.
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
  # With every logit and a KV cache, a batch of tp needs more memory than loading leaves free.
  dummy llama-30b-4xH200-tp-19GiB llama-30b --strategy=tp --llmgpu-scoring=harness --llmgpu-gpu-memory=19GiB \
    --llmgpu-limit=32
  # Loading takes more memory than batch size 64: DeepSpeed creates each layer again before it drops the old one.
  dummy llama-30b-4xH200-iok-24GiB llama-30b --strategy=iok --llmgpu-scoring=harness --llmgpu-gpu-memory=24GiB \
    --llmgpu-limit=32 --llmgpu-batch-sizes=1,2,4,8,16,32,64,128
}
paper() {
  python3 -m pytest benchmarks/paper -q -p no:cacheprovider --strategy=mp,tp,iok --llmgpu-dataset="$dataset" \
    --llmgpu-limit=64 --llmgpu-batch-sizes=1,2,4,8,16,32,64,128,256 --llmgpu-json="$out/paper-4xH200.json.gz" ||
    echo "status $?"
}
7b() { dummy llama-7b-4xH200 llama-7b --strategy=mp,tp,iok; }
speed() {
  width_104 w104-llama-30b-4xH200 llama-30b --strategy=mp,tp,iok --llmgpu-batch-sizes=1,64
  width_104 w104-llama-30b-4xH200-autotp llama-30b --strategy=tp --llmgpu-tp-backend=deepspeed --llmgpu-batch-sizes=1,64
  width_104 w104-llama-7b-4xH200 llama-7b --strategy=tp,iok --llmgpu-batch-sizes=1
  width_104 w104-llama-7b-4xH200-autotp llama-7b --strategy=tp --llmgpu-tp-backend=deepspeed --llmgpu-batch-sizes=1
}
mp_forward() { python3 benchmarks/overhead/mp_forward.py --dataset "$out/w104.jsonl" --limit 64 >"$out/mp_forward.json"; }

# 2 GPUs: the memory left beside half of the weights is that of a 32 GB card beside a quarter of them
paper_2() {
  python3 -m pytest benchmarks/paper -q -p no:cacheprovider --strategy=mp,tp,iok --llmgpu-devices=2 \
    --llmgpu-gpu-memory=47.1GiB --llmgpu-limit=128 --llmgpu-dataset="$dataset" \
    --llmgpu-json="$out/paper-2xH200.json.gz" || echo "status $?"
}
# tp on two GPUs by the local launcher, then as two nodes of one GPU each under torchrun.
nodes() {
  local node of=(--llmgpu-load-format=dummy --llmgpu-dtype=float16 --llmgpu-dataset="$dataset" --llmgpu-limit=60)
  of+=(--llmgpu-model=llama-7b --strategy=tp --llmgpu-devices=2 --llmgpu-batch-sizes=1,8,32)
  bench tp-7b-2xH200-one-node "${of[@]}"
  LLMGPU_KEY=$(openssl rand -hex 16) && export LLMGPU_KEY
  for node in 0 1; do
    CUDA_VISIBLE_DEVICES=$node torchrun --nnodes=2 --node-rank=$node --nproc-per-node=1 --master-addr=127.0.0.1 \
      --master-port=29511 -m pytest benchmarks -q -p no:cacheprovider "${of[@]}" --llmgpu-launcher=env \
      --llmgpu-json="$out/tp-7b-2xH200-two-nodes.json.gz" &
  done
  wait
}
presets() {
  for model in llama-13b llama-65b; do
    dummy "$model-${DEVICES:-2}xH200" "$model" --strategy=mp,tp,iok --llmgpu-limit=16 --llmgpu-batch-sizes=8 \
      --llmgpu-devices="${DEVICES:-2}"
  done
}

# 1 GPU; for benchmarks/gate
of_7b=(--llmgpu-model=llama-7b --llmgpu-load-format=dummy --llmgpu-limit=64 --llmgpu-devices=1)
launches() {
  bench launches-gpu "${of_7b[@]}" --llmgpu-dataset="$dataset" --llmgpu-cuda-graphs=off --llmgpu-batch-sizes=2,8,32 \
    --llmgpu-launches="${LAUNCHES:-40}"
}
# Twelve launches of CUDA graphs with work passes on each GPU of GPUS, at the same time: for the noise of device time and
# of replayed graphs, and for the differences between GPUs of one kind.
replayed() {
  local gpu
  for gpu in ${GPUS//,/ }; do
    CUDA_VISIBLE_DEVICES="$gpu" bench "replayed-7b-240-gpu-$gpu" "${of_7b[@]}" --llmgpu-dataset="$dataset" \
      --llmgpu-limit=240 --llmgpu-cuda-graphs=on --llmgpu-batch-sizes=1,8,32,64 \
      --llmgpu-launches="${LAUNCHES:-12}" >"$out/replayed-$gpu.log" 2>&1 &
  done
  wait
}
# One kernel of each layer that waits for a number of cycles, and for more of them: for what one launch finds.
own_kernel() {
  local of=("${of_7b[@]}" --llmgpu-dataset="$dataset" --llmgpu-limit=60 --llmgpu-cuda-graphs=on)
  of+=(--llmgpu-batch-sizes=1,8,32,64 --strategy=own_kernel:OwnKernel)
  export PYTHONPATH=benchmarks/gate:${PYTHONPATH:-}
  OWN_KERNEL_CYCLES=1:2161,8:3461,32:10300,64:16293 bench own-kernel-7b-gpu "${of[@]}" --llmgpu-launches="${LAUNCHES:-9}"
  OWN_KERNEL_CYCLES=1:4691,8:7546,32:25800,64:56500 bench own-kernel-7b-slower "${of[@]}" --llmgpu-launches=2
}
# A loop of Python after each layer, and a longer one: for eager forwards whose host limits.
own_loop() {
  local of=("${of_7b[@]}" --llmgpu-dataset="$dataset" --llmgpu-limit=240 --llmgpu-cuda-graphs=off)
  of+=(--llmgpu-batch-sizes=2,8,32 --strategy=own_kernel:OwnLoop)
  export PYTHONPATH=benchmarks/gate:${PYTHONPATH:-}
  OWN_LOOP=100 bench own-loop-7b-240-gpu "${of[@]}" --llmgpu-launches="${LAUNCHES:-5}"
  OWN_LOOP=1700 bench own-loop-7b-240-slower "${of[@]}" --llmgpu-launches=3
}
# The same with replays in a row, and with a kernel that takes 2 % of the time longer.
in_a_row() {
  local of=("${of_7b[@]}" --llmgpu-dataset="$dataset" --llmgpu-limit=60 --llmgpu-cuda-graphs=on)
  of+=(--llmgpu-batch-sizes=1,8,32,64 --strategy=own_kernel:OwnKernel)
  export PYTHONPATH=benchmarks/gate:${PYTHONPATH:-}
  OWN_KERNEL_CYCLES=1:2161,8:3461,32:10300,64:16293 bench in-a-row-7b-gpu "${of[@]}" --llmgpu-launches="${LAUNCHES:-7}"
  OWN_KERNEL_CYCLES=1:12300,8:19800,32:72300,64:177000 bench in-a-row-7b-slower "${of[@]}" --llmgpu-launches=2
}
# Generation and prefill of the plain model and compiled: beside bare replays and transformers, then as whole jobs.
generation() {
  python3 benchmarks/overhead/generation.py --model llama-7b --device cuda --dtype float16 >"$out/generation-1xH200.jsonl"
  dummy generate-llama-7b-1xH200 llama-7b --strategy=mp,compile --llmgpu-devices=1 --llmgpu-workload=generate \
    --llmgpu-limit=64 --llmgpu-batch-sizes=1,64
  width_104 w104-llama-7b-1xH200 llama-7b --strategy=mp,compile --llmgpu-devices=1 --llmgpu-batch-sizes=1,32
}
8b() {
  dummy llama-3-8b-1xH200 llama-3-8b --strategy=mp,iok --llmgpu-dtype=bfloat16 --llmgpu-devices=1
}
stock() { bench iok-stock-bundled-1xH200 --strategy=mp,iok --llmgpu-iok-stock --llmgpu-devices=1; }
clamped() { python3 benchmarks/reports/clamp.py "$out/iok-clamped-bundled-1xH200.json.gz" | tee "$out/clamp.jsonl"; }

for name in "$@"; do "$name"; done
