"""What a PyTorch user would run on one GPU: transformers' Llama, SDPA, torch.compile, bf16 autocast, fused AdamW on fp32 state.

    python llama_torch.py '{"num_layers": 8, "embed_dim": 4096, ..., "rows": 4, "seq_len": 8192, "steps": 10, "warmup": 3}'

Prints one JSON line for `jaxmeg.bench.peer`. One batch of random tokens, every step waited for, gradient clipped to norm 1, as ours.
"""
# pyright: reportMissingImports=false

import json
import sys
import time

import numpy as np
import torch
import transformers


def main(shape: dict) -> dict:
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["embed_dim"], intermediate_size=shape["mlp_dim"],
        num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"], max_position_embeddings=shape["seq_len"], tie_word_embeddings=shape["tied"],
        rope_theta=shape["rope_theta"], rms_norm_eps=shape["norm_eps"], use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = np.random.default_rng(0).integers(0, shape["vocab_size"], (shape["rows"], shape["seq_len"]))
    batch = torch.from_numpy(tokens).cuda()
    seconds, losses = [], []
    for _ in range(shape["warmup"] + shape["steps"]):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[shape["warmup"]:], "losses": losses, "peak_bytes": torch.cuda.max_memory_allocated(),
            "compile_s": sum(seconds[: shape["warmup"]]), "notes": ["compile time is that of the first steps"],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}


if __name__ == "__main__":
    try:
        found = main(json.loads(sys.argv[1]))
    except Exception as error:  # the bench writes it down
        found = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
    print(json.dumps(found), flush=True)
