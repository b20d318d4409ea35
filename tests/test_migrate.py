"""Configs of other stacks become ours: batch sums, models, schedules, and a word on every key.

What a source means is written here by hand, or computed by formulas of its own; shapes are compared with our presets.
"""

import json
import math
from pathlib import Path

import pytest
import yaml

from jaxmeg import cli
from jaxmeg.arch import PRESETS, resolve_arch
from jaxmeg.keys import KEYS
from jaxmeg.migrate.core import Migration, SourceError
from jaxmeg.migrate.report import to_yaml
from jaxmeg.migrate.run import check, migrate, to_config
from jaxmeg.migrate.shell import read_arguments
from jaxmeg.validate.check import problems

OFFLOADED = {"train_batch_size": 32, "gradient_accumulation_steps": 4,
             "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "fp16": {"enabled": True}}


def from_json(content: object, devices: int | None = 8, name: str = "deepspeed", **settings) -> Migration:
    return migrate(json.dumps(content), "source.json", devices, name, {key.replace("__", "."): value for key, value in settings.items()})


def from_line(line: str, devices: int | None = 8, **settings) -> Migration:
    return migrate(line, "the command line", devices, "megatron", {key.replace("__", "."): value for key, value in settings.items()})


def from_yaml(text: str, devices: int | None = 8, path: str = "source.yaml") -> Migration:
    return migrate(text, path, devices, "llamafactory", {})


def reasons(out: Migration) -> dict[str, str]:
    return {lack.source: lack.reason.text for lack in out.lacks}


def changed(out: Migration, tmp_path: Path) -> dict[str, object]:
    """What the written file says, read as train.py reads it; it has no problems on its devices but absent files."""
    assert check(out)[0] == []
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(out, "source", "python scripts/migrate.py", str(path)), encoding="utf-8")
    config = cli.parse(["--config", str(path)])
    assert config == to_config(out.values)
    missing = check(out)[1]
    assert [line for line in problems(config, out.devices) if line not in missing] == []
    sections = yaml.safe_load(path.read_text())
    written = {f"{section}.{leaf}": value for section, entries in sections.items() for leaf, value in entries.items()}
    assert all(value != KEYS[key].default for key, value in written.items())
    return written


# ---------------------------------------------------------------- DeepSpeed
@pytest.mark.parametrize(("devices", "microbatch"), [(8, 1), (2, 4), (1, 8)])
def test_the_batch_of_the_offload_example(tmp_path, devices, microbatch):
    out = from_json(OFFLOADED, devices)
    assert changed(out, tmp_path) == {
        "mesh.dp": devices, "layout.zero": 3, "pipeline.microbatch": microbatch,
        "precision.compute": "fp16", "precision.loss_scale_growth_interval": 1000}
    assert "not built yet: offload" in reasons(out)["zero_optimization.offload_optimizer"]
    ranks = "1 data-parallel rank" if devices == 1 else f"{devices} data-parallel ranks"
    rows = "1 row" if microbatch == 1 else f"{microbatch} rows"
    assert out.batch == [f"train_batch_size 32 = 4 accumulation x {ranks} x {rows}: global_batch 32, microbatch {microbatch}"]


# Given: rows an update, rows a device, accumulation; devices; then global_batch and microbatch by hand.
@pytest.mark.parametrize(
    ("total", "micro", "steps", "devices", "expected"),
    [
        (32, None, 4, 8, (32, 1)),
        (32, 2, None, 8, (32, 2)),
        (None, 2, 4, 8, (64, 2)),
        (64, 2, 4, 8, (64, 2)),
        (32, None, None, 8, (32, 4)),
        (None, 3, None, 8, (24, 3)),
        (32, "auto", 4, 4, (32, 2)),
        ("auto", 1, 16, 4, (64, 1)),
        (None, None, 4, 8, None),
        (None, None, None, 8, None),
    ],
)
def test_two_batch_sizes_give_the_third(total, micro, steps, devices, expected):
    sizes = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    out = from_json({key: value for key, value in sizes.items() if value is not None}, devices)
    assert out.problems == []
    got = (out.values["data.global_batch"], out.values["pipeline.microbatch"]) if out.batch else None
    assert got == expected


@pytest.mark.parametrize(
    ("content", "devices", "problem"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8,
         "train_batch_size=32 is not train_micro_batch_size_per_gpu=2 x gradient_accumulation_steps=4 x 8 data-parallel ranks = 64: "
         "use train_batch_size 64"),
        ({"train_batch_size": 30, "gradient_accumulation_steps": 4}, 8,
         "train_batch_size=30 is not a multiple of gradient_accumulation_steps=4 x 8 data-parallel ranks = 32: use train_batch_size 32"),
        ({"train_batch_size": "many"}, 8, "train_batch_size=many is not a size: use a whole number of 1 or more"),
        ({"train_batch_size": 0}, 8, "train_batch_size=0 is not a size: use a whole number of 1 or more"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, 8, "fp16.enabled and bf16.enabled are all true: keep one"),
        ({"tensor_parallel": {"autotp_size": 4}}, 6, "--devices 6 is not a multiple of tp=4: use --devices 4 or 8"),
        ({"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}, 6,
         "--devices 6 is not a multiple of pp=2 x tp=2 = 4: use --devices 4 or 8"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, 8,
         "zero_optimization.mics_shard_size=3 does not divide the 8 data-parallel ranks: use 1, 2, 4 or 8"),
        ({"zero_optimization": {"stage": "three"}}, 8, "zero_optimization.stage=three has the wrong type: give a whole number"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, 8, "optimizer.params.betas=0.9 is not a pair: give [0.9, 0.95]"),
    ],
)
def test_a_contradiction_is_one_line(content, devices, problem):
    assert from_json(content, devices).problems == [problem]


FULL_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 50, "gradient_clipping": 0.5,
    "wall_clock_breakdown": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 100, "total_num_steps": 5000, "warmup_type": "linear"}},
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "initial_scale_power": 12},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "mics_shard_size": 4},
    "communication_data_type": "bf16",
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "pipeline": {"stages": 2}, "tensorboard": {"enabled": False, "output_path": "logs"},
    "data_types": {"grad_accum_dtype": "fp32"}, "curriculum_learning": {"enabled": True}, "train_batchsize": 1,
}


def test_a_full_deepspeed_config(tmp_path):
    out = from_json(FULL_DEEPSPEED, 16)
    assert changed(out, tmp_path) == {
        "mesh.pp": 2, "mesh.rep": 2, "mesh.dp": 4, "layout.zero": 2, "layout.remat": "full",
        "data.global_batch": 2 * 4 * 8, "pipeline.microbatch": 2, "train.log_every": 50, "train.steps": 5000,
        "optim.lr": 2e-4, "optim.warmup": 100, "optim.schedule": "linear", "optim.final_lr_ratio": 0.0,
        "optim.beta2": 0.98, "optim.eps": 1e-6, "optim.weight_decay": 0.05, "optim.clip_norm": 0.5,
        "precision.compute": "bf16", "precision.reduce": "bf16", "record.tensorboard": False}
    said = reasons(out)
    assert said["train_batchsize"].startswith("unknown key: did you mean train_batch_size?")
    assert said["curriculum_learning"].startswith("not built yet")
    for key in ("zero_optimization.overlap_comm", "fp16.initial_scale_power", "data_types", "tensorboard.output_path",
                "activation_checkpointing.cpu_checkpointing", "wall_clock_breakdown", "scheduler.params.warmup_min_lr"):
        assert said[key].startswith("not needed"), key
    assert [lack.source for lack in out.lacks if not lack.reason.harmless] == ["curriculum_learning", "train_batchsize"]


def test_absent_keys_have_deepspeeds_defaults(tmp_path):
    """No stage is 0, no format is fp32, no scheduler keeps the rate; loss scaling starts at 2 to the given power."""
    out = from_json({"train_batch_size": 8, "optimizer": {"type": "Adam"}})
    assert changed(out, tmp_path) == {
        "mesh.dp": 8, "layout.zero": 0, "data.global_batch": 8, "pipeline.microbatch": 1, "precision.compute": "fp32", "optim.lr": 1e-3,
        "optim.beta2": 0.999, "optim.weight_decay": 0.0, "optim.schedule": "constant", "optim.warmup": 0}
    scaled = from_json({"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}})
    assert scaled.values["precision.loss_scale_init"] == 4096
    assert scaled.values["precision.loss_scale_growth_interval"] == 500


def test_auto_is_left_to_our_defaults():
    out = from_json({"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
                     "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}})
    assert not {"data.global_batch", "precision.compute", "optim.lr", "optim.weight_decay"} & out.values.keys()
    assert "fills it in" in reasons(out)["train_batch_size"]


@pytest.mark.parametrize(
    ("optimizer", "values", "without"),
    [
        ({"type": "Lion", "params": {"lr": 1e-4, "betas": [0.95, 0.98]}}, {"name": "lion", "beta1": 0.95, "beta2": 0.98}, ()),
        ({"type": "Muon", "params": {"lr": 1, "muon_lr": 0.02, "adam_lr": 1e-3}}, {"name": "muon", "lr": 0.02, "momentum": 0.95},
         ("optimizer.params.adam_lr",)),
        ({"type": "SGD", "params": {"momentum": 0.8, "betas": [1, 2]}}, {"name": "sgd", "momentum": 0.8}, ()),
        ({"type": "OneBitAdam", "params": {"lr": 1e-3, "weight_decay": 0.2}}, {"lr": 1e-3, "weight_decay": 0.2}, ("optimizer.type",)),
        ({"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}, {"name": "adamw"}, ("optimizer.params.adam_w_mode",)),
        ({"type": "Adam", "params": {"weight_decay": 0, "adam_w_mode": False}}, {"name": "adamw"}, ()),
    ],
)
def test_optimizers(optimizer, values, without):
    out = from_json({"train_batch_size": 8, "optimizer": optimizer})
    assert {leaf: out.get(f"optim.{leaf}") for leaf in values} == values
    assert tuple(lack.source for lack in out.lacks if not lack.reason.harmless) == without
    assert check(out)[0] == []


def test_sequence_parallel_ranks_become_data_parallel():
    """8 devices in pairs are 4 ranks there: 4 x 2 x 2 rows an update; 8 ranks here, each 2 rows."""
    out = from_json({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "sequence_parallel_size": 2})
    assert (out.values["data.global_batch"], out.values["pipeline.microbatch"], out.values["mesh.dp"]) == (16, 2, 8)
    assert "2 accumulation x 4 data-parallel ranks x 2 rows; here 1 accumulation x 8" in out.batch[0]
    assert reasons(out)["sequence_parallel_size"].startswith("not built yet")


# ---------------------------------------------------------------- Megatron-LM
LLAMA = """#!/bin/bash
# An 8B model on two hosts.
TP=4
PP=${PP:-2}
CHECKPOINTS="runs/llama"
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32   # width
    --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --max-position-embeddings 131072
    --seq-length 8192 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 500000 --attention-dropout 0 --hidden-dropout 0.0
)
OPTIONS=" --micro-batch-size 1 --global-batch-size=128 \\
    --train-samples 1280000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-samples 12800 \\
    --weight-decay 0.1 --adam-beta2 0.95 --bf16"
ARGS+=("--use-distributed-optimizer" "--num-distributed-optimizer-instances 2")
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
    ${ARGS[@]} $OPTIONS --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \\
    --num-layers-per-virtual-pipeline-stage 4 --recompute-granularity full --recompute-method uniform \\
    --data-path 0.7 data/web 0.3 data/code --split 90,10,0 --vocab-size 128256 --tokenizer-type NullTokenizer \\
    --reset-position-ids --reset-attention-mask --eod-mask-loss --seed 7 --save $CHECKPOINTS --load $CHECKPOINTS \\
    --save-interval 500 --eval-interval 100 --eval-iters 2 --log-interval 5 --overlap-grad-reduce --fp8-format hybrid
"""


def test_a_full_megatron_script(tmp_path):
    out = migrate(LLAMA, "train.sh", None, None, {})
    assert out.source == "Megatron-LM" and out.devices == 16
    written = changed(out, tmp_path)
    assert {key: value for key, value in written.items() if not key.startswith("model.")} == {
        "mesh.pp": 2, "mesh.tp": 4, "mesh.rep": 2, "mesh.dp": 1, "layout.remat": "full",
        "pipeline.schedule": "interleaved", "pipeline.chunks": 4, "pipeline.microbatch": 1, "data.global_batch": 128, "data.seq_len": 8192,
        "train.steps": 10_000, "optim.lr": 3e-4, "optim.warmup": 100, "precision.compute": "bf16",
        "data.train": {"data/web": 0.7, "data/code": 0.3}, "data.validation_fraction": 0.1, "train.seed": 7, "train.out": "runs/llama",
        "checkpoint.every": 500, "train.eval_rows": 256, "train.log_every": 5}
    assert resolve_arch(to_config(out.values).model) == PRESETS["llama3.1-8b"]
    assert [lack.source for lack in out.lacks if not lack.reason.harmless] == ["--fp8-format"]
    said = reasons(out)
    for name in ("--eod-mask-loss", "--load", "--overlap-grad-reduce", "--recompute-method", "--nnodes", "--attention-dropout"):
        assert said[name].startswith("not needed"), name


def test_megatrons_defaults_build_gpt2(tmp_path):
    """A command that names sizes only is GPT-2, and trains as Megatron does by default."""
    out = from_line("pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
                    "--max-position-embeddings 1024 --micro-batch-size 4 --train-iters 1000 --lr 6e-4", 8)
    written = changed(out, tmp_path)
    assert resolve_arch(to_config(out.values).model) == PRESETS["gpt2"]
    assert {key: value for key, value in written.items() if not key.startswith("model.")} == {
        "mesh.dp": 8, "layout.zero": 0, "pipeline.microbatch": 4, "precision.compute": "fp32", "data.separate": False,
        "data.seq_len": 1024, "train.steps": 1000, "train.dropout": 0.1, "train.seed": 1234, "train.log_every": 100,
        "train.eval_every": 0, "train.eval_rows": 3200, "optim.lr": 6e-4, "optim.schedule": "linear", "optim.final_lr_ratio": 0.0,
        "optim.warmup": 0, "optim.beta2": 0.999, "optim.weight_decay": 0.01}
    assert "--attention-dropout" in reasons(out)
    gated = from_line("--num-layers 2 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --swiglu --fp16 --vocab-size 99")
    assert gated.values["model.mlp_dim"] == 1344  # 4 x 512 x 2/3, down to a multiple of 64
    assert (gated.values["precision.loss_scale_init"], gated.values["model.vocab_size"]) == (2.0**32, 99)


def test_a_layout_alone_keeps_our_model(tmp_path):
    out = from_line("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4")
    assert changed(out, tmp_path) == {"mesh.pp": 4, "mesh.dp": 1, "mesh.tp": 2}
    assert "model.preset is demo" in out.remarks[0]
    assert "--swiglu" in reasons(from_line("--tensor-model-parallel-size 2 --swiglu"))


SIZES = "--num-layers 8 --hidden-size 96 --num-attention-heads 8 --max-position-embeddings 128 --micro-batch-size 1 "


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--data-parallel-sharding-strategy optim_grads", {"layout.zero": 2}),
        ("--use-megatron-fsdp", {"layout.zero": 3}),
        ("--use-megatron-fsdp --grad-reduce-in-bf16", {"precision.reduce": "bf16"}),
        ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 4", {"pipeline.chunks": 2}),
        ("--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 4", {"pipeline.chunks": None}),
        ("--recompute-activations", {"layout.remat": "selective"}),
        ("--add-qkv-bias --disable-bias-linear", {"model.attn_bias": True, "model.out_bias": False, "model.mlp_bias": False}),
        ("--qk-layernorm --normalization RMSNorm", {"model.qk_norm": True}),
        ("--use-rotary-position-embeddings --no-position-embedding", {"model.positions": "rope", "model.rope_theta": 10_000.0}),
        ("--lr 1e-3 --lr-decay-style WSD --train-iters 100 --lr-wsd-decay-iters 30", {"optim.schedule": "wsd", "optim.wsd_decay": 0.3}),
        ("--lr 1e-3 --train-iters 100 --lr-warmup-fraction 0.05 --lr-decay-iters 80", {"optim.warmup": 4}),
        ("--optimizer lion --lion-beta2 0.97", {"optim.name": "lion", "optim.beta1": 0.95, "optim.beta2": 0.97}),
        ("--optimizer sgd --sgd-momentum 0.5", {"optim.name": "sgd", "optim.momentum": 0.5}),
        ("--optimizer muon", {"optim.name": "muon", "optim.momentum": 0.9, "optim.newton_schulz_steps": 5}),
        ("--eval-iters 0 --split 90,10", {"data.validation_fraction": 0.0}),
        ("--data-path one --reset-attention-mask", {"data.train": "one", "data.separate": False, "data.validation_fraction": 0.03}),
        ("--data-path 1 a 2 a", {"data.train": {"a": 3.0}}),
        ("--train-data-path a --valid-data-path b", {"data.train": "a", "data.validation": "b", "data.validation_fraction": 0.05}),
        ("--profile --profile-step-start 4 --profile-step-end 6", {"record.profile": "5:7"}),
        ("--context-parallel-size 2", {"mesh.cp": 1, "mesh.dp": 8, "data.global_batch": 4}),
        ("--global-batch-size 64 --train-samples 6400", {"train.steps": 100, "pipeline.microbatch": 1}),
    ],
)
def test_what_megatrons_arguments_say_together(line, values):
    out = from_line(f"{SIZES} {line}")
    assert out.problems == []
    assert {key: out.get(key) for key in values} == values


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--num-layers 8 --micro-batch-size 1", "--hidden-size and --num-attention-heads missing: Megatron needs --num-layers"),
        (f"{SIZES} --bf16 --fp16", "--bf16 and --fp16 are both given: keep one"),
        (f"{SIZES} --train-iters 1 --train-samples 8", "--train-iters and --train-samples are both given: keep one"),
        (f"{SIZES} --global-batch-size 12", "--global-batch-size=12 is not a multiple of --micro-batch-size=1 x 8 data-parallel ranks = 8"),
        (f"{SIZES} --num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
         "--num-layers-per-virtual-pipeline-stage=3 x 2 stages does not divide --num-layers=8"),
        ("--tensor-model-parallel-size $TP", "--tensor-model-parallel-size $TP: the text does not set this variable"),
        ("--num-layers 2 --hidden-size 64 --num-attention-heads 3 --micro-batch-size 1", "--num-attention-heads=3 does not divide"),
        ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", "--num-distributed-optimizer-instances=3 does not divide"),
        ("--lr fast", "--lr=fast has the wrong type: give a number"),
    ],
)
def test_a_command_that_cannot_be_is_one_line(line, problem):
    (found,) = from_line(line).problems
    assert found.startswith(problem)


def test_arguments_are_found_in_any_shell_text():
    plain = "--a 1 --b x y --c --d=2"
    expected = {"--a": "1", "--b": ["x", "y"], "--c": True, "--d": "2"}
    for text in (plain, f"python t.py {plain} > log 2>&1", "A=(\n  --a 1 # one\n  --b x y\n  --c\n)\nrun ${A[@]} --d=2",
                 'ARGS="--a 1 --b x y"\nARGS+=("--c" "--d=2")', "ONE=1\nexport X=x\n--a $ONE --b ${X} ${Y:-y} \\\n --c --d=${Z:-2}",
                 "if [ $# -eq 0 ]; then\n run --a 1 --b x y; fi\n--c && run --d=2"):
        assert read_arguments(text)[0] == expected, text
    assert read_arguments("--a_b 1 --a-b 2") == ({"--a-b": "2"}, ["--a-b"])
    with pytest.raises(SourceError, match="no closing quotation"):
        read_arguments("--a 'b")


def test_the_vocabulary_is_counted_in_the_tokenizers_file(tmp_path):
    content = {"model": {"vocab": {"a": 0, "b": 6}}, "added_tokens": [{"id": 9, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    out = from_line(f"{SIZES} --data-path x --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}")
    assert (out.values["model.vocab_size"], out.values["data.tokenizer"]) == (10, str(tmp_path / "tokenizer.json"))
    unknown = from_line(f"{SIZES} --tokenizer-type HuggingFaceTokenizer --tokenizer-model some/model")
    assert "model.vocab_size" not in unknown.values and "--set model.vocab_size" in reasons(unknown)["--vocab-size"]


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD", "constant"])
def test_the_learning_rate_is_megatrons(style):
    """At every update the rate is that of Megatron's formula: warm-up from 0, then decay to min-lr at the last update."""
    from jaxmeg.optim.build import learning_rate

    out = from_line(f"{SIZES} --lr 2e-3 --min-lr 2e-4 --train-iters 100 --lr-warmup-iters 10 --lr-decay-style {style} "
                    "--lr-wsd-decay-iters 20 --lr-wsd-decay-style linear")
    ours = learning_rate(to_config(out.values).optim, 100)

    def theirs(step: int) -> float:
        ratio = (step - 10) / 90
        left = {"linear": 1 - ratio, "cosine": (math.cos(math.pi * ratio) + 1) / 2, "WSD": min(1, (100 - step) / 20), "constant": 1}[style]
        return 2e-3 * step / 10 if step <= 10 else 2e-4 + left * (2e-3 - 2e-4)

    assert [float(ours(step)) for step in range(101)] == pytest.approx([theirs(step) for step in range(101)], rel=1e-5)


# ---------------------------------------------------------------- LLaMA-Factory
PRETRAIN = """
model_name_or_path: meta-llama/Llama-3.2-1B
stage: pt
do_train: true
finetuning_type: full
deepspeed: ds/z2.json
dataset: wiki_demo
cutoff_len: 4096
preprocessing_num_workers: 16
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1e-4
max_steps: 2000
lr_scheduler_type: cosine
warmup_ratio: 0.03
adam_beta2: 0.95
weight_decay: 0.1
max_grad_norm: 0.5
bf16: true
output_dir: saves/llama-pt
logging_steps: 20
save_steps: 250
save_total_limit: 3
val_size: 0.02
eval_strategy: steps
eval_steps: 200
seed: 3
report_to: tensorboard
resume_from_checkpoint: null
optm: adamw_torch
"""
AUTO_ZERO_2 = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 8,
               "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def test_a_full_llamafactory_config_with_its_deepspeed_file(tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "z2.json").write_text(json.dumps(AUTO_ZERO_2))
    out = from_yaml(PRETRAIN, 4, str(tmp_path / "pretrain.yaml"))
    assert changed(out, tmp_path) == {
        "mesh.dp": 4, "layout.zero": 2, "layout.remat": "full", "pipeline.microbatch": 2, "data.global_batch": 64, "data.seq_len": 4096,
        "data.separate": False, "data.validation_fraction": 0.02, "optim.lr": 1e-4, "optim.warmup": 60, "optim.final_lr_ratio": 0.0,
        "optim.clip_norm": 0.5, "precision.compute": "bf16", "train.steps": 2000, "train.seed": 3, "train.log_every": 20,
        "train.eval_every": 200, "train.eval_rows": 0, "train.out": "saves/llama-pt", "checkpoint.every": 250, "checkpoint.keep": 3}
    assert out.batch == ["rows an update 64 = 8 accumulation x 4 data-parallel ranks x 2 rows: global_batch 64, microbatch 2"]
    assert {lack.source for lack in out.lacks if not lack.reason.harmless} == {
        "model_name_or_path", "dataset", "optm", "z2.json: zero_optimization.offload_optimizer"}
    assert reasons(out)["optm"].startswith("unknown key: did you mean optim?")


def test_absent_keys_have_the_trainers_defaults(tmp_path):
    out = from_yaml("stage: sft\nmodel_name_or_path: x\n", 2)
    assert changed(out, tmp_path) == {
        "mesh.dp": 2, "layout.zero": 0, "layout.remat": "full", "pipeline.microbatch": 8, "data.global_batch": 16, "data.seq_len": 2048,
        "data.packing": "none", "data.long_documents": "truncate", "data.validation_fraction": 0.0, "optim.lr": 5e-5, "optim.warmup": 0,
        "optim.schedule": "linear", "optim.final_lr_ratio": 0.0, "optim.beta2": 0.999, "optim.weight_decay": 0.0, "train.seed": 42,
        "precision.compute": "fp32", "train.eval_every": 0, "checkpoint.every": 500}
    assert {"stage", "num_train_epochs"} <= {lack.source for lack in out.lacks if not lack.reason.harmless}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("neat_packing: true", {"data.packing": "fit", "data.separate": True, "data.long_documents": "drop"}),
        ("packing: true", {"data.packing": "fit", "data.separate": False}),
        ("stage: pt\npacking: false", {"data.packing": "none", "data.long_documents": "truncate"}),
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.1", {"optim.schedule": "constant", "optim.warmup": 0}),
        ("warmup_steps: 25", {"optim.warmup": 25}),
        ("lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 1e-3\nlr_scheduler_kwargs: {min_lr: 1e-4}", {"optim.final_lr_ratio": 0.1}),
        ("lr_scheduler_type: warmup_stable_decay\nmax_steps: 100\nlr_scheduler_kwargs: {num_decay_steps: 30}", {"optim.wsd_decay": 0.3}),
        ("use_muon: true", {"optim.name": "muon", "optim.momentum": 0.95}),
        ("optim: adafactor", {"optim.name": "adafactor"}),
        ("optim: paged_adamw_8bit", {"optim.name": "adamw"}),
        ("fsdp: full_shard auto_wrap", {"layout.zero": 3}),
        ("disable_gradient_checkpointing: true", {"layout.remat": "none"}),
        ("report_to: [none]", {"record.tensorboard": False}),
        ("save_strategy: 'no'\nsave_steps: 5", {"checkpoint.every": 0}),
        ("deepspeed: {zero_optimization: {stage: 3}, fp16: {initial_scale_power: 10}}\nfp16: true",
         {"layout.zero": 3, "precision.compute": "fp16", "precision.loss_scale_init": 1024.0}),
        ("deepspeed: gone.json", {"layout.zero": 1}),
    ],
)
def test_what_llamafactorys_keys_say_together(text, values):
    out = from_yaml(text)
    assert check(out)[0] == []
    assert {key: out.get(key) for key in values} == values


def test_the_deepspeed_file_must_agree():
    out = from_yaml("gradient_accumulation_steps: 4\ndeepspeed: {gradient_accumulation_steps: 8, train_micro_batch_size_per_gpu: 8}")
    assert out.problems == ['deepspeed: gradient_accumulation_steps=8 is not the 4 of the YAML: write "auto"']
    assert from_yaml("bf16: true\nfp16: true").problems == ["bf16 and fp16 are both true: keep one"]
