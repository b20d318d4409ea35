#!/usr/bin/env python3
"""Time the train step on synthetic tokens: `python scripts/bench.py --model llama3.1-8b --model.num_layers 8 ...`.

Prints one JSON line: median step seconds over --train.steps steps after three warm-up steps, tokens/s, MFU, memory, compile time, versions.
"""

import json
import statistics
import sys
import time

from jaxmeg.cli import parse, start


def main(argv: list[str]) -> int:
    config = parse(argv)
    start(config)

    import jax
    import numpy as np

    from jaxmeg.flops import mfu, train_flops_per_token
    from jaxmeg.hardware import peak_tflops
    from jaxmeg.mesh import format_mesh
    from jaxmeg.setup import build
    from jaxmeg.state import init_state
    from jaxmeg.step import make_train_step, place_rows

    setup = build(config, jax.devices())
    arch, rows, seq = setup.resolved.arch, config.data.global_batch, config.data.seq_len
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, arch.vocab_size, (rows, seq + 1), dtype=np.int32)
    batch = place_rows(setup, tokens[:, :-1], tokens[:, 1:], np.ones((rows, seq), bool), setup.resolved.num_microbatches)
    state = init_state(setup, config.train.seed)
    started = time.perf_counter()
    step = make_train_step(setup).lower(state, batch).compile()
    compile_seconds = time.perf_counter() - started

    seconds, loss = [], 0.0
    for _ in range(3 + config.train.steps):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics.loss)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[3:])
    device = jax.devices()[0]
    peak, memory, stats = peak_tflops(device.device_kind), step.memory_analysis(), device.memory_stats() or {}
    per_second = rows * seq / median
    print(json.dumps({
        "model": config.model.preset, "layers": arch.num_layers, "seq_len": seq, "rows": rows, "mesh": format_mesh(setup.layout.sizes),
        "microbatches": setup.resolved.num_microbatches, "zero": config.layout.zero, "remat": config.layout.remat, "compute": setup.compute,
        "attention": setup.model.options.kernel, "schedule": setup.resolved.schedule, "loss": round(loss, 4),
        "step_s": round(median, 4), "spread_s": round(max(seconds[3:]) - min(seconds[3:]), 4), "tokens_per_s": round(per_second),
        "tflops": round(train_flops_per_token(arch, seq) * per_second / 1e12, 1),
        "mfu": round(mfu(arch, seq, per_second, setup.mesh.devices.size, peak), 4) if peak else None,
        "temp_GiB": round(memory.temp_size_in_bytes / 2**30, 2) if memory else None,
        "peak_GiB": round(stats.get("peak_bytes_in_use", 0) / 2**30, 2), "compile_s": round(compile_seconds, 1),
        "device": device.device_kind, "jax": jax.__version__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
