#!/bin/bash
# MaxText on one GPU, synthetic tokens: maxtext.sh '{"num_layers": 8, ...}', a shape as `jaxmeg.bench.peer` gives it.
# Needs MaxText 0.2.5 and what it imports, e.g. from wheels: pip install --no-deps maxtext==0.2.5 and its requirements; its import of
# xprof can be met by an empty package xprof/cli/tools/get_kernel_stats_tool.py with a function main.
# MAXTEXT_OPTIONS holds more key=value words (scan_layers=false remat_policy=minimal_with_context attention=cudnn_flash_jax by default).
# Its log has seconds and loss of a step to three places; those of the first steps are left out. No peak of the allocator is printed.
set -o pipefail
shape=$1
get() { python3 -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$shape" "$1"; }
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
export DECOUPLE_GCLOUD=TRUE HF_HUB_OFFLINE=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 TF_CPP_MIN_LOG_LEVEL=3
base=$(python3 -c "import maxtext, os; print(os.path.join(os.path.dirname(maxtext.__file__), 'configs/base.yml'))")
python3 -m maxtext.trainers.pre_train.train "$base" run_name=bench base_output_directory="$out" dataset_type=synthetic hardware=gpu \
  skip_jax_distributed_system=True enable_checkpointing=False enable_goodput_recording=False monitor_goodput=False \
  steps=$(($(get steps) + $(get warmup))) per_device_batch_size="$(get rows)" max_target_length="$(get seq_len)" \
  base_emb_dim="$(get embed_dim)" base_mlp_dim="$(get mlp_dim)" base_num_decoder_layers="$(get num_layers)" \
  base_num_query_heads="$(get num_heads)" base_num_kv_heads="$(get num_kv_heads)" head_dim="$(get head_dim)" \
  vocab_size="$(get vocab_size)" logits_via_embedding="$(get tied)" decoder_block=llama2 dtype=bfloat16 weight_dtype=float32 \
  ${MAXTEXT_OPTIONS:-scan_layers=false remat_policy=minimal_with_context attention=cudnn_flash_jax} >"$out/log" 2>&1
python3 - "$out/log" "$(get warmup)" <<'P'
import json, re, sys
from importlib.metadata import version
log = open(sys.argv[1], errors="replace").read()
rows = re.findall(r"completed step: \d+, seconds: ([\d.]+),.*?loss: ([\d.]+|nan)", log)
seconds, losses, warmup = [float(s) for s, _ in rows], [float(x) for _, x in rows], int(sys.argv[2])
if len(rows) > warmup:
    print(json.dumps({"seconds": seconds[warmup:], "losses": losses, "peak_bytes": None, "compile_s": seconds[0],
                      "notes": ["compile time is that of the first step"], "versions": {"maxtext": version("maxtext"), "jax": version("jax")}}))
else:
    lines = [line for line in log.splitlines() if "rror" in line] or ["it completed no step"]
    print(json.dumps({"error": lines[-1].strip()[:300]}))
P
