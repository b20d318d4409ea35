"""Configs whose memory the compiler has been asked for: `planner_facts.json` is what it said, made by running this file.

Needs the extra `aot`: python tests/planner_cases.py. Each program is compiled for H200s that are not there, a minute each at most.
"""

import json
import sys
from pathlib import Path

FACTS = Path(__file__).with_name("planner_facts.json")
COMMON = "--precision bf16 --data.packing none"
B8 = "--model llama3.1-8b"
CASES: dict[str, tuple[int, str]] = {
    "8 layers": (1, f"{B8} --model.num_layers 8 --seq_len 8192 --global_batch 4"),
    "8 layers, full": (1, f"{B8} --model.num_layers 8 --seq_len 8192 --global_batch 4 --remat full"),
    "8 layers, selective": (1, f"{B8} --model.num_layers 8 --seq_len 8192 --global_batch 4 --remat selective"),
    "4 layers, 4 microbatches": (1, f"{B8} --model.num_layers 4 --seq_len 8192 --global_batch 4 --microbatch 1"),
    "1b tied": (1, "--model llama3.2-1b --seq_len 4096 --global_batch 4"),
    "1b long": (1, "--model llama3.2-1b --seq_len 32768 --global_batch 1 --remat full"),
    "gpt2": (1, "--model gpt2 --seq_len 1024 --global_batch 32"),
    "135m": (1, "--model smollm2-135m --seq_len 2048 --global_batch 16"),
    "dp8 zero 0": (8, f"{B8} --seq_len 4096 --global_batch 64 --mesh dp=8 --zero 0 --microbatch 1 --remat selective"),
    "dp8 zero 1": (8, f"{B8} --seq_len 4096 --global_batch 64 --mesh dp=8 --zero 1 --microbatch 1 --remat selective"),
    "dp8 zero 2": (8, f"{B8} --seq_len 4096 --global_batch 64 --mesh dp=8 --zero 2 --microbatch 2"),
    "dp8 zero 3": (8, f"{B8} --seq_len 4096 --global_batch 64 --mesh dp=8 --zero 3 --microbatch 2"),
    "dp8 zero 3, full": (8, f"{B8} --seq_len 4096 --global_batch 64 --mesh dp=8 --zero 3 --microbatch 4 --remat full"),
    "tp8, 16 rows": (8, f"{B8} --seq_len 8192 --global_batch 16 --mesh tp=8"),
    "tp4 pp2": (8, f"{B8} --seq_len 8192 --global_batch 16 --mesh tp=4,pp=2 --microbatch 1"),
    "pp4 tp2, selective": (8, f"{B8} --seq_len 4096 --global_batch 32 --mesh pp=4,tp=2 --microbatch 1 --remat selective"),
    "pp4 tp2, interleaved": (8, f"{B8} --seq_len 4096 --global_batch 32 --mesh pp=4,tp=2 --microbatch 1 --schedule interleaved"),
    "pp2 dp2 tp2 zero 3": (8, f"{B8} --seq_len 4096 --global_batch 32 --mesh pp=2,dp=2,tp=2 --zero 3 --microbatch 1"),
    "pp4 dp2 zero 2, gpipe": (
        8, f"{B8} --seq_len 4096 --global_batch 64 --mesh pp=4,dp=2 --zero 2 --microbatch 1 --schedule gpipe --remat full"),
    "70b dp8 zero 3": (8, "--model llama3.1-70b --seq_len 4096 --global_batch 16 --mesh dp=8 --zero 3 --microbatch 1 --remat full"),
    "70b tp8": (8, "--model llama3.1-70b --seq_len 8192 --global_batch 16 --mesh tp=8 --microbatch 1 --remat selective"),
    "1b dp8 zero 3, written out": (
        8, "--model llama3.2-1b --seq_len 4096 --global_batch 64 --mesh dp=8 --zero 3 --layout.scan_layers false"),
}


def argv(name: str) -> list[str]:
    return f"{COMMON} {CASES[name][1]}".split()


def main(names: list[str]) -> None:
    """Compile the named cases, or all, and write down what the compiler says."""
    from jaxmeg import _compat

    _compat.prepare_gpu_topology()
    import jax

    from jaxmeg.aot import compile_train_step, gpu_devices
    from jaxmeg.cli import read

    facts = json.loads(FACTS.read_text()) if FACTS.exists() and names else {"cases": {}}
    facts["made_with"] = f"jax {jax.__version__}, for H200"
    for name in names or CASES:
        _, compiled = compile_train_step(read(argv(name)), gpu_devices("h200", CASES[name][0]))
        sizes = compiled.memory_analysis()
        assert sizes is not None
        facts["cases"][name] = {"arguments": sizes.argument_size_in_bytes, "temporaries": sizes.temp_size_in_bytes,
                                "other": sizes.output_size_in_bytes - sizes.alias_size_in_bytes}
        print(name, {key: f"{size / 2**30:.2f} GiB" for key, size in facts["cases"][name].items()}, flush=True)
    FACTS.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
