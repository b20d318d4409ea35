"""Every key of every table is reported, nothing crashes on odd values, and `scripts/migrate.py` keeps its promises."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmeg import cli
from jaxmeg.arch import PRESETS, resolve_arch
from jaxmeg.keys import KEYS
from jaxmeg.migrate import deepspeed, llamafactory, megatron
from jaxmeg.migrate.core import ABSENT, Migration, Reason, SourceError, Table, To, lookup
from jaxmeg.migrate.report import to_lines
from jaxmeg.migrate.run import FORMATS, check, migrate, recognise, to_config

ROOT = Path(__file__).resolve().parents[1]
OFFLOADED = {"train_batch_size": 32, "gradient_accumulation_steps": 4,
             "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "fp16": {"enabled": True}}
TABLES = {name: form.table for name, form in FORMATS.items()}
ODD = [True, None, 0, -1, 1.5, "abc", "none", "auto", "1e400", [], ["a", "b"], {"enabled": True}, {"a": {"b": 1}}]


def nested(key: str, value: object) -> dict[str, object]:
    """{"a": {"b": value}} for "a.b"."""
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def carried(name: str, key: str, value: object) -> Migration:
    """A source with one key."""
    out = Migration(source=FORMATS[name].name, devices=8)
    FORMATS[name].migrate(nested(key, value) if name == "deepspeed" else {key: value}, out, "source")
    return out


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_a_table_is_reported_whatever_its_value(name):
    """Its entry is the one that is found, and each value is a row, a reason or a problem of one line; never a traceback."""
    for pattern, entry in TABLES[name].items():
        key = pattern.replace("*", "x")
        assert lookup(TABLES[name], key) is entry, f"{pattern} is hidden by another entry"
        for value in ODD:
            out = carried(name, key, value)
            named = [row.source for row in out.rows] + [lack.source for lack in out.lacks] + out.problems
            assert any(text.startswith(key) or f" {key}" in text for text in named), (key, value)
            assert all("\n" not in line for line in (*out.problems, *(lack.reason.text for lack in out.lacks)))
            if not isinstance(entry, Reason):
                check(out)


def test_what_users_write_is_known():
    """Names from the documentation of each source, in its spelling; a misspelt table entry would make them unknown."""
    names = {
        "deepspeed":
            "train_batch_size zero_optimization.stage zero_optimization.offload_param zero_optimization.overlap_comm fp16.hysteresis "
            "zero_optimization.zero_hpz_partition_size zero_optimization.stage3_max_live_parameters wall_clock_breakdown aio "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save zero_allow_untested_optimizer bf16.enabled elasticity "
            "communication_data_type gradient_clipping steps_per_print activation_checkpointing.cpu_checkpointing flops_profiler "
            "tensorboard.job_name data_types optimizer.params.weight_decay scheduler.params.warmup_num_steps curriculum_learning",
        "megatron":
            "--tensor-model-parallel-size --sequence-parallel --context-parallel-size --expert-model-parallel-size --num-experts "
            "--overlap-grad-reduce --overlap-param-gather --recompute-method --transformer-impl --fp8-format --use-mcore-models "
            "--no-masked-softmax-fusion --no-async-tensor-model-parallel-allreduce --rotary-percent --init-method-std --hysteresis "
            "--attention-backend --use-flash-attn --distributed-backend --distributed-timeout-minutes --wandb-project --ckpt-format "
            "--make-vocab-size-divisible-by --rampup-batch-size --log-throughput --exit-duration-in-mins --dataloader-type",
        "llamafactory":
            "model_name_or_path stage finetuning_type lora_rank lora_target dataset template cutoff_len max_samples packing "
            "overwrite_cache preprocessing_num_workers output_dir plot_loss save_only_model ddp_timeout pref_beta warmup_ratio "
            "gradient_checkpointing neftune_noise_alpha flash_attn quantization_bit deepspeed report_to",
    }
    unknown = [key for name, keys in names.items() for key in keys.split() if lookup(TABLES[name], key) is None]
    assert unknown == []


def test_the_keys_of_ours_exist_and_defaults_convert():
    tables: list[Table] = [*TABLES.values(), deepspeed.LOSS_SCALE, megatron.LOSS_SCALE]
    entries = [entry for table in tables for entry in table.values() if isinstance(entry, To)]
    assert len(entries) > 30
    for entry in entries:
        assert entry.key in KEYS
        if entry.default is not ABSENT:
            value, kind = entry.convert(entry.default), KEYS[entry.key].type
            assert isinstance(value, kind if kind is not float else int | float), entry
    assert llamafactory.TABLE["seed"] == TABLES["llamafactory"]["seed"]


def test_formats_are_seen_from_their_keys():
    texts = {
        "deepspeed": json.dumps(OFFLOADED),
        "megatron": "torchrun pretrain_gpt.py --num-layers 2 --bf16",
        "llamafactory": "stage: sft\nbf16: true\nlearning_rate: 1e-4\n",
    }
    assert {name: recognise(text, "x") for name, text in texts.items()} == {name: name for name in texts}
    assert recognise('{"stage": "pt", "bf16": true, "learning_rate": 1}', "x") == "llamafactory"
    assert recognise('{"fp16": {"enabled": true}}', "x") == "deepspeed"
    for text in ("", "hello", "[1, 2]", "{}", "a: 1", '{"a": 1}', "ls --colour", '{"fp16": {"enabled": true},}'):
        with pytest.raises(SourceError, match="not recognised"):
            recognise(text, "x")


def test_the_documents_examples_are_true():
    """docs/migrating.md: what it shows is printed, and each example becomes what the text says."""
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    blocks = [block.partition("\n")[2] for block in re.findall(r"^```(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    source, printed, shell, yaml_text = blocks[1:]
    lines = to_lines(migrate(source, "ds.json", 8, None, {}), "ds.json")
    assert [line for line in printed.splitlines() if line not in lines] == []
    out = migrate(shell, "train.sh", None, None, {})
    assert resolve_arch(to_config(out.values).model) == PRESETS["llama3.1-8b"] and check(out)[0] == []
    expected = {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 4, "layout.zero": 1, "pipeline.chunks": 4, "train.steps": 10_000,
                "optim.warmup": 100, "data.global_batch": 128, "data.train": {"data/web": 0.7, "data/code": 0.3}}
    assert {key: out.get(key) for key in expected} == expected
    out = migrate(yaml_text, "pt.yaml", 4, None, {})
    expected = {"data.global_batch": 64, "pipeline.microbatch": 2, "optim.warmup": 60, "layout.remat": "full"}
    assert {key: out.get(key) for key in expected} == expected


# ---------------------------------------------------------------- the script
@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("migrate_script", ROOT / "scripts" / "migrate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def stopped(script, capsys, *argv: str) -> list[str]:
    """The errors of a call that ends with 2."""
    with pytest.raises(SystemExit) as info:
        script(list(argv))
    assert info.value.code == 2
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def test_a_config_is_written_and_explained(script, capsys, tmp_path):
    source, target = tmp_path / "ds.json", tmp_path / "configs" / "mine.yaml"
    source.write_text(json.dumps(OFFLOADED))
    assert script([str(source), "--devices", "8", "--out", str(target)]) == 0
    out, err = capsys.readouterr()
    assert "train_batch_size 32 = 4 accumulation x 8 data-parallel ranks x 1 row: global_batch 32, microbatch 1\n" in out
    assert f"wrote {target}; train with\n  python scripts/train.py --config {target}\n" in out
    assert err.splitlines() == ["warning: zero_optimization.offload_optimizer {device: cpu}: not built yet: offload to the host; state "
                                "stays on the devices, sharded by ZeRO"]
    header = [line for line in target.read_text().splitlines() if line.startswith("#")]
    assert header[0].startswith(f"# Migrated from {source} (DeepSpeed): python scripts/migrate.py {source} --devices 8")
    assert header[1:3] == [f"# Command:  python scripts/train.py --config {target}", "# Devices:  8"]
    assert cli.parse(["--config", str(target)]).layout.zero == 3
    assert script([str(source), "--devices", "2", "--out", str(target)]) == 0  # its own file may be written again
    assert cli.parse(["--config", str(target)]).mesh.dp == 2


def test_megatron_arguments_come_after_two_dashes(script, capsys):
    assert script(["--devices", "8", "--", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("mesh:\n  pp: 4\n  dp: 1\n  tp: 2\n") and err == ""
    assert "model.preset is demo" in out


def test_what_the_user_sets_wins(script, capsys, tmp_path):
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}}))
    errors = stopped(script, capsys, str(source), "--out", str(tmp_path / "mine.yaml"))
    assert errors[0].startswith("error: optim.warmup=1000 is more than train.steps=180")
    assert not (tmp_path / "mine.yaml").exists()
    assert script([str(source), "--set", "steps=5000", "--set", "optim.lr=3e-4", "--set", "data.train=null"]) == 0
    assert "  lr: 0.0003\n" in (out := capsys.readouterr().out) and "  steps: 5000\n" in out


def test_mistakes_end_with_2_and_write_nothing(script, capsys, tmp_path):
    good, bad, kept = tmp_path / "ds.json", tmp_path / "bad.json", tmp_path / "kept.yaml"
    good.write_text(json.dumps(OFFLOADED))
    bad.write_text('{"train_batch_size": 32,}')
    kept.write_text("mesh: {tp: 2}\n")
    before = sorted(tmp_path.iterdir())
    cases = {
        ("nowhere.json",): "nowhere.json cannot be read (No such file or directory)",
        (str(tmp_path),): f"{tmp_path} cannot be read (Is a directory)",
        (str(bad),): f"{bad} is not recognised ({bad} is not valid JSON: ",
        (str(bad), "--from", "deepspeed"): f"{bad} is not valid JSON: ",
        (str(good), "--devices", "3", "--out", str(tmp_path / "new.yaml")): "train_batch_size=32 is not a multiple of gradient_accum",
        (str(good), "--devices", "0"): "--devices 0: use 1 or more",
        (str(good), "--out", str(kept)): f"--out {kept} exists and was not written here: give another name",
        (str(good), "--set", "optim.lrr=1"): "--set optim.lrr=1: unknown key optim.lrr: did you mean optim.lr?",
        (str(good), "--set", "steps"): "--set steps: write KEY=VALUE",
        (str(good), "--set", "steps=many"): "train.steps=many has the wrong type: give a whole number",
        (): "give a file, or Megatron-LM arguments after --",
    }
    for argv, message in cases.items():
        assert stopped(script, capsys, *argv)[0].startswith(f"error: {message}"), argv
    assert sorted(tmp_path.iterdir()) == before and kept.read_text() == "mesh: {tp: 2}\n"


def test_files_of_another_machine_are_warnings(script, capsys):
    argv = ["--", "--tensor-model-parallel-size", "1", "--data-path", "/far/away_text_document"]
    assert script(argv) == 0
    out, err = capsys.readouterr()
    assert "train: /far/away_text_document" in out and "data.train=/far/away_text_document does not exist" in err


def test_the_offload_example_trains(script, tmp_path):
    """Two updates with the written batch and ZeRO stage, in a process of its own; a model of one layer compiles faster."""
    source, target = tmp_path / "ds.json", tmp_path / "mine.yaml"
    source.write_text(json.dumps(OFFLOADED))
    assert script([str(source), "--devices", "2", "--out", str(target)]) == 0
    env = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    shorter = "--model toy --model.num_layers 1 --seq_len 16 --steps 2 --train.sample_tokens 0 --data.validation_fraction 0"
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(target), "--emulate", "2", "--out", "run"]
    done = subprocess.run([*command, *shorter.split()], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "dp=2, ZeRO 3" in done.stdout and "compute fp16" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["tokens"] for record in records if "tokens" in record] == [32 * 16] * 2
