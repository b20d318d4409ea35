"""Questions people ask about layouts, answered by the planner; docs/planning.md is this, printed.

`python -m jaxmeg.planner.questions` prints the page; tests hold the answers to published arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxmeg.arch import num_params, resolve_arch
from jaxmeg.config import Config, DataConfig, LayoutConfig, MeshConfig, ModelConfig, PipelineConfig
from jaxmeg.planner import paper
from jaxmeg.planner.chips import Cluster, Link, parse_cluster
from jaxmeg.planner.search import Plan, judge, search
from jaxmeg.planner.text import GIB, command
from jaxmeg.validate.mesh_rules import named_axes


def _llama(num_layers: int, embed_dim: int, mlp_dim: int, num_heads: int) -> ModelConfig:
    return ModelConfig(preset="llama3.1-8b", vocab_size=32_000, num_layers=num_layers, embed_dim=embed_dim, mlp_dim=mlp_dim,
                       num_heads=num_heads, num_kv_heads=num_heads)


def _gpt3(num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(preset="gpt2", vocab_size=51_200, num_layers=num_layers, embed_dim=128 * num_heads, mlp_dim=512 * num_heads,
                       num_heads=num_heads, num_kv_heads=num_heads, head_dim=128, max_seq_len=2048)


MODELS: dict[str, ModelConfig] = {
    "7B": _llama(32, 4096, 11_008, 32), "13B": _llama(40, 5120, 13_824, 40), "30B": _llama(60, 6656, 17_920, 52),
    "70B": ModelConfig(preset="llama3.1-70b"), "100B": _gpt3(80, 80), "175B": _gpt3(96, 96)}
"""Published shapes: Llama 1 and 2, Llama 3.1, GPT-3; 100B is GPT-3's, narrower."""


def config_of(model: str, *, seq_len: int = 2048, global_batch: int = 256, zero: int = 1, remat: str = "none", **mesh: int) -> Config:
    pipeline = PipelineConfig(microbatch=1)
    return Config(model=MODELS[model], mesh=MeshConfig(**mesh), layout=LayoutConfig(zero=zero, remat=remat), pipeline=pipeline,
                  data=DataConfig(seq_len=seq_len, global_batch=global_batch, packing="none"))


def parameters(model: str) -> int:
    return num_params(resolve_arch(MODELS[model]))


def fits(plan: Plan) -> str:
    room = (plan.budget - plan.memory.total) / GIB
    return f"{plan.memory.total / GIB:.1f} GiB of {plan.budget / GIB:.1f} a GPU, " + ("fits" if room >= 0 else f"{-room:.1f} too much")


def by_line(plan: Plan) -> str:
    return " + ".join(f"{line.bytes / GIB:.1f} {line.name}" for line in plan.memory.lines if line.bytes >= 0.05 * GIB)


def one_line(plan: Plan) -> str:
    layout = f"{named_axes(plan.config.mesh)}, ZeRO {plan.config.layout.zero}, remat {plan.config.layout.remat}"
    return f"{layout}: {fits(plan)}; predicted {plan.speed.tokens_per_second:,.0f} tokens/s, MFU {plan.speed.mfu:.2f}"


def best(model: str, gpus: str, seq_len: int = 2048, global_batch: int = 256) -> list[str]:
    """The fastest layout that fits and its memory by line, or the smallest and by how much it does not."""
    found = search(config_of(model, seq_len=seq_len, global_batch=global_batch), parse_cluster(gpus), top=1)
    plan = (found.fitting or found.nearest)[0]
    return [one_line(plan), f"memory: {by_line(plan)} GiB", f"`{command(plan.config)}`"]


# ------------------------------------------------------------------ the answers
def zero_memory() -> Iterator[str]:
    yield ("As the ZeRO paper counts, 2 bytes of weights + 2 of gradients + 12 of optimizer state; stage 1 cuts the 12, stage 2 the "
           "gradients too, stage 3 all:")
    for text, number, ranks in (("7.5B on 64 GPUs", 7_500_000_000, 64), ("7B on 8 GPUs", 7_000_000_000, 8)):
        stages = " / ".join(f"{float(paper.zero_bytes(number, stage, ranks)) / 1e9:.4g}" for stage in range(4))
        yield f"{text}, stages 0 / 1 / 2 / 3: {stages} GB a GPU"
    yield f"However many GPUs: stage 1 saves at most {paper.zero_limit(1)}x, stage 2 at most {paper.zero_limit(2)}x, stage 3 has no limit."
    plan = judge(config_of("7B", zero=3, dp=8), parse_cluster("8xA100-80G"))
    yield f"This program, the 7B on 8 GPUs, stage 3, one row of 2,048 tokens at a time: {by_line(plan)} GiB."


def communication() -> Iterator[str]:
    sent = " / ".join(str(paper.zero_sent(1, stage)) for stage in (1, 2, 3))
    yield f"ZeRO 1 / 2 / 3: {sent} x the parameters a step: gradients are reduced, weights gathered, at stage 3 twice."
    yield "At stages 2 and 3 here it is once a microbatch for gradients, at stage 3 for weights too: fewer, larger microbatches send less."
    yield f"Tensor parallelism: {paper.tensor_parallel_reductions(1)} all-reduces a layer and microbatch, forward and backward."
    yield "Here each is a gather and a scatter of the same bytes, and two gathers more, as gathered tokens are not kept."


def largest() -> Iterator[str]:
    yield f"By the 16 bytes of papers and nothing else: {paper.largest_model(80e9, 8) / 1e9:.0f}B."
    plan = None
    for layers in range(80, 0, -1):
        config = config_of("70B", zero=3, remat="full", dp=8, global_batch=8)
        plan = judge(replace(config, model=replace(config.model, num_layers=layers)), parse_cluster("8xA100-80G"))
        if plan.fits:
            break
    assert plan is not None
    arch = plan.resolved.arch
    yield (f"This program keeps 18, activations and workspace: {num_params(arch) / 1e9:.1f}B ({arch.num_layers} layers of the 70B), "
           f"one row of 2,048 tokens, remat full: {fits(plan)}: {by_line(plan)} GiB.")


def thirty() -> Iterator[str]:
    for remat in ("none", "selective", "full"):
        plan = judge(config_of("30B", zero=3, remat=remat, dp=8, seq_len=4096), parse_cluster("8xA100-80G"))
        yield one_line(plan)
    yield "With checkpointing it is activations that shrink; what ZeRO 3 cuts stays."


def thirteen() -> Iterator[str]:
    number = 13_000_000_000
    yield (f"By papers: 2 x 13 + 14 x 13 / 4 = {float(paper.zero_bytes(number, 2, 4)) / 1e9:.1f} GB a GPU: it cannot fit 32 GB, "
           f"whatever the batch. Stage 3: {float(paper.zero_bytes(number, 3, 4)) / 1e9:.0f} GB: neither.")
    for zero in (2, 3):
        yield one_line(judge(config_of("13B", zero=zero, remat="full", dp=4), parse_cluster("4xV100-32G")))
    yield "V100s are for these formulas only: CUDA 13 does not build for them."


def seventy() -> Iterator[str]:
    yield (f"Weights, gradients and optimizer state are 16 x 70 = 1,120 GB: "
           f"{float(paper.zero_bytes(70_000_000_000, 3, 8)) / 1e9:.0f} GB a card by "
           "ZeRO 3 alone. The 30 GB that are often told would be 3.5 bytes a parameter: weights in 16 bits and nothing to train them with.")
    yield from best("70B", "8xA100-80G", seq_len=4096, global_batch=64)
    yield "On 32:"
    yield from best("70B", "32xA100-80G", seq_len=4096, global_batch=64)


def hundred() -> Iterator[str]:
    yield from best("100B", "32xA100-80G")


def gpt3() -> Iterator[str]:
    number = parameters("175B")
    yield (f"{number / 1e9:.0f}B parameters: fp32 weights alone are {4 * number / 64 / 1e9:.1f} GB a GPU, all 16 bytes "
           f"{16 * number / 64 / 1e9:.0f} GB.")
    yield from best("175B", "64xA100-80G")


def tensor_or_zero() -> Iterator[str]:
    """tp=8 against dp=8 with ZeRO 3, on links of a host and on a narrow one, for a large and a small batch."""
    usual = parse_cluster("8xH100-80G")
    slow = replace(usual.chip, name="H100 on PCIe", node_link=Link(kind="PCIe", gb_s=25))
    for name, cluster in (("NVLink", usual), ("25 GB/s", Cluster(chip=slow, count=8))):
        for rows in (8, 64):
            common = config_of("13B", zero=3, remat="selective", global_batch=rows, dp=8)
            by_rows = replace(common, pipeline=PipelineConfig(microbatch=rows // 8))
            by_width = replace(common, mesh=MeshConfig(tp=8), layout=replace(common.layout, zero=1), pipeline=PipelineConfig(microbatch=8))
            zero, tensor = (f"{plan.speed.tokens_per_second:,.0f} tokens/s ({plan.memory.total / GIB:.0f} GiB)"
                            for plan in (judge(by_rows, cluster), judge(by_width, cluster)))
            yield f"{name}, {rows} rows of 2,048: ZeRO 3 {zero}, tensor parallel {tensor}"
    yield ("ZeRO 3 sends weights, however many tokens there are; tensor parallelism sends tokens, however many weights there are. So ZeRO "
           "3 wins as the rows of a microbatch grow, and tensor parallelism where they are few or one row's activations do not fit.")


QUESTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "How much memory does each ZeRO stage need?": zero_memory,
    "What do ZeRO and tensor parallelism send?": communication,
    "How large a model can ZeRO 3 alone train on 8 x 80 GB?": largest,
    "A 7B model on 8 x A100-80G?": lambda: iter(best("7B", "8xA100-80G", seq_len=4096)),
    "A 30B model on 8 x A100-80G, with and without checkpointing?": thirty,
    "A 13B model on 4 x V100-32G with ZeRO 2 and fp16?": thirteen,
    "A 70B model on 8 x A100-80G?": seventy,
    "A 100B model on 32 x A100-80G?": hundred,
    "A 175B model on 64 x A100-80G?": gpt3,
    "Tensor parallelism or ZeRO 3?": tensor_or_zero,
}


def page() -> str:
    lines = ["# Which layout? Answers from the planner", "",
             "Made by `python -m jaxmeg.planner.questions`. Memory and time are predicted from closed formulas, not measured; "
             "`python scripts/plan.py --explain` shows each formula for your model, `--check` asks the real compiler.", ""]
    for question, answer in QUESTIONS.items():
        lines += [f"## {question}", "", *(f"- {line}" for line in answer()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
