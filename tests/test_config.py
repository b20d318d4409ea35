"""Every rule of the config has a failing example with its message; every file in configs/ is valid."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import yaml

from jaxmeg.arch import Arch
from jaxmeg.cli import parse
from jaxmeg.config import AXES, Axis, Config, ModelConfig, bubble_fraction, default_microbatch, resolve, split_layers
from jaxmeg.keys import KEYS
from jaxmeg.rules import ALLOWED, DEFAULT_RULES, MESH_AXES, load_rules
from jaxmeg.validate import value_rules
from jaxmeg.validate.check import bubble_line, mesh_line, problems, warnings

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def make(values: dict[str, object] | str) -> Config:
    """A config with some dotted keys set, from a dict or from "key=value key=value"."""
    config = Config()
    if isinstance(values, str):
        pairs = (pair.split("=") for pair in values.split())
        values = {key: yaml.safe_load(text) if text else "" for key, text in pairs}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        changed = replace(getattr(config, section), **{leaf: value}) if section else value
        config = replace(config, **{section or leaf: changed})
    return config


RULES = [
    # The mesh against the devices: both numbers, the nearest meshes, a way to emulate.
    ("mesh.tp=8 mesh.dp=2", 8,
     "mesh dp=2,tp=8 needs 16 devices, but there are 8 devices: use --mesh tp=8, dp=2,tp=4 or dp=4,tp=2, or "
     "--emulate 16"),
    ("mesh.pp=2", 1,
     "mesh pp=2 needs 2 devices, but there is 1 device: use --mesh dp=1, or --emulate 2"),
    ("mesh.dp=2 mesh.tp=2", 8,
     "mesh dp=2,tp=2 uses 4 of 8 devices: leave dp out, use --mesh dp=4,tp=2, dp=2,tp=4 or dp=8, or --emulate 4"),
    ("mesh.pp=3", 8,
     "mesh pp=3 needs a multiple of 3 devices, but there are 8 devices: use --mesh pp=4,dp=2, pp=2,dp=4 or "
     "pp=4,tp=2, or --emulate 3"),
    ("mesh.cp=2", 2,
     "mesh.cp=2 asks for context parallelism, which is not built yet: use cp 1"),
    ("mesh.ep=2", 2,
     "mesh.ep=2 asks for expert parallelism, which is not built yet: use ep 1"),
    ("mesh.tp=0", 8,
     "mesh.tp=0 is out of range: use 1 or more"),
    # The model against the mesh.
    ("mesh.tp=4 model.num_heads=6 model.num_kv_heads=2", 4,
     "mesh.tp=4 does not divide model.num_heads=6: use tp 1, 2, 3 or 6"),
    ("mesh.tp=4 model.mlp_dim=130", 4,
     "mesh.tp=4 does not divide model.mlp_dim=130: use tp 1, 2, 5 or 10, or mlp_dim 128 or 132"),
    ("mesh.tp=4 data.seq_len=130", 4,
     "mesh.tp=4 does not divide data.seq_len=130: use seq_len 128 or 132, or tp 1, 2, 5 or 10"),
    ("mesh.tp=4 model.num_heads=12 model.num_kv_heads=3", 4,
     "mesh.tp=4 neither divides model.num_kv_heads=3 nor is a multiple of it: use tp 1, 3 or 6"),
    ("mesh.pp=4 model.num_layers=3", 4,
     "model.num_layers=3 is fewer than mesh.pp=4 stages: use pp 1, 2 or 3"),
    ("mesh.pp=4 pipeline.schedule=interleaved pipeline.chunks=3", 4,
     "model.num_layers=8 is fewer than mesh.pp=4 stages x 3 chunks = 12 pieces: use pp 1 or 2 or chunks 1 or 2"),
    # The batch against the mesh.
    ("mesh.dp=4 data.global_batch=19", 4,
     "mesh.dp=4 does not divide data.global_batch=19: use global_batch 16 or 20, or dp 1 or 19"),
    ("mesh.rep=2 mesh.dp=2 data.global_batch=6", 4,
     "mesh.rep*dp=2*2=4 does not divide data.global_batch=6: use global_batch 4 or 8, or rep*dp 1, 2, 3 or 6"),
    ("mesh.dp=4 pipeline.microbatch=3", 4,
     "pipeline.microbatch=3 does not divide the 8 rows of a data-parallel rank (data.global_batch=32 over "
     "mesh.dp=4): use microbatch 1, 2, 4 or 8"),
    # The schedule.
    ("mesh.pp=2 pipeline.schedule=interleaved pipeline.chunks=1", 2,
     "pipeline.chunks=1 does not fit pipeline.schedule=interleaved: use chunks 2 or more, or schedule 1f1b"),
    ("mesh.pp=2 pipeline.schedule=1f1b pipeline.chunks=2", 2,
     "pipeline.chunks=2 does not fit pipeline.schedule=1f1b: use schedule interleaved, or chunks 1"),
    ("mesh.pp=2 pipeline.chunks=2", 2,
     "pipeline.chunks=2 does not fit pipeline.schedule=1f1b (the default): use schedule interleaved, or chunks 1"),
    # The model and the row by themselves.
    ("model.preset=lama3.1-8b", 1,
     "model.preset=lama3.1-8b is not a choice: did you mean llama3.1-8b?"),
    ("model.num_kv_heads=3", 1,
     "model.num_kv_heads=3 does not divide model.num_heads=8: use num_kv_heads 1, 2, 4 or 8"),
    ("model.head_dim=13", 1,
     "model.head_dim=13 is odd and rope rotates pairs: use head_dim 12 or 14"),
    ("model.preset=gpt2 data.seq_len=2048", 1,
     "data.seq_len=2048 is longer than the position table, model.max_seq_len=1024: use seq_len 1024 or less, or a "
     "larger max_seq_len"),
    ("layout.zero=4", 1,
     "layout.zero=4 is out of range: use 0, 1, 2 or 3"),
    ("layout.remat=ful", 1,
     "layout.remat=ful is not a choice: did you mean full? use none, selective or full"),
    ("optim.lr=.nan", 1,
     "optim.lr=nan is out of range: use a number above 0"),
    ("optim.lr=.inf", 1,
     "optim.lr=inf is out of range: use a number above 0"),
    ("train.dropout=1.0", 1,
     "train.dropout=1.0 is out of range: use a number in [0, 1)"),
    ("optim.warmup=400", 1,
     "optim.warmup=400 is more than train.steps=180: use warmup 180 or less, or more steps"),
    ("optim.schedule=wsd optim.wsd_decay=0.9 optim.warmup=36", 1,
     "optim.wsd_decay=0.9 of train.steps=180 starts inside optim.warmup=36: use wsd_decay 0.8 or less"),
    # Options that nothing would read.
    ("pipeline.schedule=1f1b", 1,
     "pipeline.schedule=1f1b has no effect with mesh.pp=1: leave schedule out, or use pp 2 or more"),
    ("pipeline.chunks=2", 1,
     "pipeline.chunks=2 has no effect with mesh.pp=1: leave chunks out, or use pp 2 or more"),
    ("mesh.rep=2 mesh.dp=2 layout.zero=0", 4,
     "mesh.rep=2 has no effect with layout.zero=0, which has no ZeRO groups: use dp 4 and rep 1, or zero 1, 2 or 3"),
    ("precision.reduce=bf16", 1,
     "precision.reduce=bf16 has no effect with layout.zero=1: leave reduce out, or use zero 2 or 3"),
    ("precision.loss_scale_init=8.0 precision.compute=bf16", 1,
     "precision.loss_scale_init=8.0 has no effect with precision.compute=bf16: leave loss_scale_init out, or use "
     "compute fp16 or auto"),
    ("precision.loss_scale_growth_interval=5 precision.compute=fp32", 1,
     "precision.loss_scale_growth_interval=5 has no effect with precision.compute=fp32"),
    ("optim.wsd_decay=0.5", 1,
     "optim.wsd_decay=0.5 has no effect with optim.schedule=cosine: leave wsd_decay out, or use schedule wsd"),
    ("optim.schedule=constant optim.final_lr_ratio=0.5", 1,
     "optim.final_lr_ratio=0.5 has no effect with optim.schedule=constant"),
    ("optim.momentum=0.5", 1,
     "optim.momentum=0.5 has no effect with optim.name=adamw: leave momentum out, or use name sgd"),
    ("optim.name=sgd optim.beta1=0.5", 1,
     "optim.beta1=0.5 has no effect with optim.name=sgd"),
    ("optim.name=sgd optim.beta2=0.5", 1,
     "optim.beta2=0.5 has no effect with optim.name=sgd"),
    ("optim.name=sgd optim.eps=0.5", 1,
     "optim.eps=0.5 has no effect with optim.name=sgd"),
    ("model.preset=gpt2 model.rope_theta=5.0", 1,
     "model.rope_theta=5.0 has no effect with model.positions=learned"),
    # Files.
    ("data.train=no/such.txt", 1,
     "data.train=no/such.txt does not exist: give a .txt, .jsonl or .parquet file"),
    ("layout.rules=no/such.yaml", 1,
     "layout.rules=no/such.yaml: cannot be read (No such file or directory): give an existing YAML file"),
    ("train.out=", 1,
     "train.out is empty: give a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "num_devices", "message"), RULES, ids=[rule[2][:60] for rule in RULES])
def test_rule_is_named_with_its_fix(values, num_devices, message):
    found = problems(make(values), num_devices)
    assert any(line.startswith(message) for line in found), "\n".join(found)
    assert all("\n" not in line for line in found)
    assert len(found) == 1 or num_devices == 8, found  # one mistake, one line; a wrong mesh may break several rules


def test_all_problems_come_at_once():
    wrong = {"mesh.tp": 4, "model.num_heads": 6, "model.num_kv_heads": 2, "model.mlp_dim": 130, "data.seq_len": 130}
    found = problems(make({**wrong, "mesh.dp": 4, "data.global_batch": 19, "optim.lr": 0.0}), 16)
    for core in ("model.num_heads=6", "model.mlp_dim=130", "data.seq_len=130", "data.global_batch=19", "optim.lr=0.0"):
        assert sum(core in line for line in found) == 1
    assert len(found) == 5


@pytest.mark.parametrize("key", value_rules.RANGES)
def test_every_range_refuses_a_value_below_it(key):
    found = problems(make({key: -1}), 1)
    assert any(line.startswith(f"{key}=-1 is out of range: use ") for line in found)


@pytest.mark.parametrize("key", value_rules.CHOICES)
def test_every_choice_refuses_another_word(key):
    found = problems(make({key: "qqqqqq"}), 1)
    assert any(line.startswith(f"{key}=qqqqqq is not a choice: use ") for line in found)


def test_every_number_has_a_range():
    others = (str, bool, str | None, bool | None, str | dict[str, float] | None)
    numbers = {name for name, key in KEYS.items() if key.type not in others}
    assert numbers == set(value_rules.RANGES)


@pytest.mark.parametrize(("values", "message"), [
    ({"data.long_documents": "drop"}, "data.long_documents=drop has no effect with data.packing=concat"),
    ({"data.packing": "none", "data.separate": False}, "data.separate=False has no effect with data.packing=none"),
    ({"data.validation": __file__, "data.validation_fraction": 0.2}, "data.validation_fraction=0.2 has no effect with data.validation="),
    ({"data.source": "a:b"}, "data.source=a:b has no effect without model.module"),
    ({"model.loss": "a:b"}, "model.loss=a:b has no effect without model.module"),
    ({"train.steps": 10, "train.stop_after": 11}, "train.stop_after=11 has no effect with train.steps=10"),
    ({"checkpoint.resume": "a", "checkpoint.init_from": "b"}, "checkpoint.init_from=b has no effect with checkpoint.resume=a"),
    ({"checkpoint.allow_changes": True}, "checkpoint.allow_changes=True has no effect without checkpoint.resume"),
    ({"checkpoint.keep_best": 1, "checkpoint.every": 50}, "checkpoint.keep_best=1 needs every saved step evaluated"),
    ({"distributed.num_processes": 2}, "distributed.num_processes=2 needs distributed.coordinator and distributed.process_id too"),
    ({"distributed.coordinator": "a:1", "distributed.num_processes": 2, "distributed.process_id": 2},
     "distributed.process_id=2 is out of range: use 0 to 1"),
    ({"distributed.coordinator": "a:1", "distributed.num_processes": 3, "distributed.process_id": 0, "emulate": 4},
     "distributed.num_processes=3 does not divide emulate=4: use emulate 3"),
    ({"data.tokenizer": "no.json"}, "data.tokenizer=no.json is not a file"),
    ({"data.train": {__file__: -1.0}}, f"data.train: the weight -1.0 of {__file__} is out of range"),
])  # fmt: skip
def test_options_of_a_run_that_need_each_other(values, message):
    assert any(line.startswith(message) for line in problems(make(values), 1)), problems(make(values), 1)


@pytest.mark.parametrize(("values", "message"), [
    ({"mesh.tp": 2}, "mesh.tp=2 does not work with a module of your own"),
    ({"mesh.dp": 3}, "mesh dp=3 does not fit 8 devices"),
    ({"data.global_batch": 12}, "mesh.dp=8 does not divide data.global_batch=12"),
    ({"data.train": "x.txt"}, "data.train=x.txt has no effect on a module of your own"),
    ({"optim.lr": 0.0}, "optim.lr=0.0 is out of range"),
])  # fmt: skip
def test_a_module_of_ones_own_has_rules_of_its_own(values, message):
    assert problems(make({"model.module": "a:b"}), 8) == []
    assert [line for line in problems(make({"model.module": "a:b"} | values), 8) if line.startswith(message)]


def test_defaults_run_anywhere():
    for num_devices in (1, 2, 4, 8):
        assert problems(Config(), num_devices) == []
    assert warnings(Config(), 1) == []


# Rule tables.


def write_rules(folder: Path, text: str) -> str:
    path = folder / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("headz: [tp]", 'unknown dim "headz": did you mean heads? use layers,'),
        ("mlp: [tpp]", 'mlp: unknown mesh axis "tpp": did you mean tp? use pp,'),
        ("vocab: [tp, tp]", "vocab: axis tp is named 2 times: name it once"),
        ("mlp: [pp]", "mlp: [pp] is not allowed: use [tp] or []"),
        ("vocab: [tp, pp]", "vocab: [tp, pp] is not allowed: use [pp, tp], [pp], [tp] or []"),
        ("layers: []", "layers: [] is not allowed: use [pp]"),
        ("embed: [dp]", "embed: [dp] is not allowed: ZeRO chooses the sharding of embed, set layout.zero"),
        ("mlp: tp", "mlp: 'tp' is not a list of mesh axes: write for example [tp]"),
        ("heads: []", "heads: [] needs kv_heads: [] as well"),
        ("kv_heads: []", "kv_heads: [] needs heads: [] as well"),
        ("[1, 2]", "expected a table of dim: [axes], found list"),
        ("a: [", "is not valid YAML: while parsing"),
    ],
)
def test_rule_table_is_checked(tmp_path, text, message):
    path = write_rules(tmp_path, text)
    found = problems(make({"layout.rules": path}), 1)
    assert len(found) == 1
    assert found[0].startswith(f"layout.rules={path}: {message}")
    with pytest.raises(ValueError, match=re.escape(message)):
        load_rules(path)


def test_rule_table_overrides_entries(tmp_path):
    path = write_rules(tmp_path, "heads: []\nkv_heads: []\nvocab: [tp]\n")
    assert load_rules(path) == {**DEFAULT_RULES, "heads": (), "kv_heads": (), "vocab": ("tp",)}
    assert load_rules(write_rules(tmp_path, "# nothing\n")) == load_rules(None) == dict(DEFAULT_RULES)


def test_a_dim_left_whole_need_not_divide(tmp_path):
    values = {"mesh.tp": 4, "model.num_heads": 6, "model.num_kv_heads": 3, "model.mlp_dim": 130}
    assert len(problems(make(values), 4)) == 3
    path = write_rules(tmp_path, "heads: []\nkv_heads: []\nmlp: []\n")
    assert problems(make({**values, "layout.rules": path}), 4) == []


def test_axes_and_fields_are_written_once():
    assert [str(axis) for axis in AXES] == list(MESH_AXES)
    assert set(ALLOWED) == set(DEFAULT_RULES)
    assert {field.name for field in fields(ModelConfig)} == {"preset", "module", "loss", *(field.name for field in fields(Arch))}


def test_sections_are_small_and_documented():
    for field in fields(Config):
        value = getattr(Config(), field.name)
        assert not is_dataclass(value) or len(fields(value)) < 25
    assert all(len(key.doc) > 3 for key in KEYS.values())


# Sizes that follow.


def test_resolve_fills_in_what_was_left_out():
    sizes = resolve(make({"mesh.pp": 2, "mesh.tp": 2, "model.vocab_size": 250}), 8)
    assert sizes.mesh == {"pp": 2, "rep": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert list(sizes.mesh) == list(AXES)
    assert (sizes.schedule, sizes.chunks, sizes.local_rows) == ("1f1b", 1, 16)
    assert (sizes.microbatch, sizes.num_microbatches) == (4, 4)
    assert sizes.padded_vocab == 252
    assert sizes.layer_split == (4, 4)
    assert mesh_line(sizes) == "pp=2 rep=1 dp=2 ep=1 cp=1 tp=2 (8 devices)"


def test_resolve_without_a_pipeline():
    sizes = resolve(Config(), 4)
    assert (sizes.schedule, sizes.chunks, sizes.microbatch, sizes.num_microbatches) == (None, 1, 8, 1)
    assert sizes.mesh[Axis.DP] == 4
    assert sizes.bubble == 0


def test_interleaved_has_two_chunks():
    sizes = resolve(make({"mesh.pp": 4, "pipeline.schedule": "interleaved"}), 4)
    assert (sizes.chunks, sizes.layer_split) == (2, (1,) * 8)


@pytest.mark.parametrize(
    ("local_rows", "pp", "microbatch"),
    [(32, 1, 32), (32, 2, 8), (32, 4, 4), (6, 2, 1), (12, 2, 3), (7, 4, 1), (1, 4, 1)],
)
def test_default_microbatch(local_rows, pp, microbatch):
    assert default_microbatch(local_rows, pp) == microbatch


@pytest.mark.parametrize(
    ("num_layers", "parts", "split"),
    [(6, 4, (2, 2, 1, 1)), (30, 4, (8, 8, 7, 7)), (8, 8, (1,) * 8)],
)
def test_no_layer_is_dropped(num_layers, parts, split):
    assert split_layers(num_layers, parts) == split
    assert sum(split) == num_layers


def test_bubble():
    assert bubble_line(resolve(make({"mesh.pp": 4}), 4)) == "predicted bubble 3/11 = 27.3%"
    assert bubble_fraction(1, 5) == 0
    assert float(bubble_fraction(4, 16, 2)) == pytest.approx(1.5 / 17.5)
    assert float(bubble_fraction(4, 3, 2)) == pytest.approx(2.0 / 5.0)  # fewer microbatches than stages


@pytest.mark.parametrize(("rows", "bubble"), [(1, "3/4 = 75.0%"), (2, "3/5 = 60.0%"), (3, "1/2 = 50.0%")])
def test_fewer_microbatches_than_stages_is_a_warning(rows, bubble):
    config = make({"mesh.pp": 4, "data.global_batch": rows})
    assert problems(config, 4) == []
    (line,) = warnings(config, 4)
    assert line.startswith(f"{rows} microbatches are fewer than mesh.pp=4 stages: predicted bubble {bubble}; ")


@pytest.mark.parametrize(
    ("values", "num_devices", "message"),
    [
        ({"mesh.pp": 4, "model.num_layers": 30}, 4, "model.num_layers=30 does not divide by 4 pieces: 8 + 8 + 7 + 7"),
        ({"layout.zero": 3}, 1, "layout.zero=3 shards nothing: mesh.dp is 1"),
        ({"train.steps": 3}, 1, "optim.warmup=10 is more than train.steps=3: the learning rate does not reach"),
    ],
)
def test_warnings(values, num_devices, message):
    config = make(values)
    assert problems(config, num_devices) == []
    (line,) = warnings(config, num_devices)
    assert line.startswith(message)


# The files in configs/.


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_config_file_is_valid(path):
    text = path.read_text(encoding="utf-8")
    header = text[: re.search(r"^[^#]", text, re.MULTILINE).start()]
    assert f"--config configs/{path.name}" in header
    assert "# Chips:" in header
    assert "# Expected:" in header
    num_devices = int(re.search(r"^# Devices: +(\d+)$", header, re.MULTILINE).group(1))
    config = parse(["--config", str(path)])
    assert problems(config, num_devices) == []
    assert warnings(config, num_devices) == []
    assert config.train.out == f"runs/{path.stem}"


def test_config_files_hold_only_differences():
    for path in CONFIGS:
        config = parse(["--config", str(path)])
        given = re.findall(r"^( *)(\w+):(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        section = ""
        for indent, name, value in given:
            if not indent:
                section = name
            elif value and not (path.stem == "demo" and name == "out"):
                key = f"{section}.{name}"
                assert value_rules.value_of(config, key) != KEYS[key].default, f"{path.name}: {key} is the default"


def test_demo_file_is_the_default():
    assert parse(["--config", str(ROOT / "configs" / "demo.yaml")]) == Config()
