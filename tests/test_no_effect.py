"""An option that has no effect is an error or a warning that names it: for text, a module of one's own, one's own loop, one device.

What each of these reads is written down here by hand, so that a new option has to be put somewhere.
"""

from fnmatch import fnmatch

import jax
import pytest
from test_config import make

from jaxmeg.cli import ConfigError, config_of
from jaxmeg.keys import KEYS
from jaxmeg.task import text_task
from jaxmeg.train import run
from jaxmeg.validate.check import problems
from jaxmeg.validate.module_rules import unread_by_engine
from jaxmeg.validate.run_rules import unread
from jaxmeg.validate.value_rules import CHOICES

MODULE = {"model.module": "a:b"}
NO_VALIDATION = {"data.validation_fraction": 0.0}
SAVED = {"checkpoint.every": 100}


def named(lines, key: str) -> list[str]:
    return [line for line in lines if line.startswith(f"{key}=")]


# key -> its value, and what stands beside it
TEXT = [
    ("data.long_documents", "drop", {}),
    ("data.separate", False, {"data.packing": "none"}),
    ("data.max_documents", 3, {"data.packing": "none"}),
    ("data.max_documents", 3, {"data.separate": False}),
    ("data.source", "a:b", {}),
    ("data.text_key", "body", {}),
    ("data.text_key", "body", {"data.train": "a.txt", "data.validation": "b.bin"}),
    ("data.validation_fraction", 0.2, {"data.validation": __file__}),
    ("train.sample_prompt", "Once", {"train.sample_tokens": 0}),
    ("train.stop_after", 181, {}),
    ("checkpoint.keep_best", 1, SAVED | NO_VALIDATION),
    ("checkpoint.init_from", "a", {"checkpoint.resume": "b"}),
    ("checkpoint.allow_changes", True, {}),
    ("layout.attention", "cudnn_packed", {"data.packing": "none"}),
    ("layout.attention", "cudnn_packed", {"data.separate": False, "data.max_documents": 3}),
    ("model.loss", "a:b", {}),
    ("model.rope_theta", 5.0, {"model.positions": "learned"}),
    ("precision.loss_scale_init", 8.0, {"precision.compute": "bf16"}),
    ("precision.loss_scale_growth_interval", 5, {"precision.compute": "fp32"}),
    ("precision.reduce", "bf16", {"layout.zero": 1}),
    ("precision.fp8_head", True, {}),
    ("pipeline.schedule", "1f1b", {}),
    ("pipeline.chunks", 2, {}),
    ("mesh.rep", 2, {"mesh.dp": 1, "layout.zero": 0}),
    ("optim.wsd_decay", 0.5, {}),
    ("optim.final_lr_ratio", 0.5, {"optim.schedule": "constant"}),
    ("optim.momentum", 0.5, {}),
    ("guard.spike_deviations", 3.0, {"guard.loss_spike": "off"}),
]


@pytest.mark.parametrize(("key", "value", "beside"), TEXT, ids=[f"{key} {beside}"[:60] for key, _, beside in TEXT])
def test_text_on_the_decoder(key, value, beside):
    assert [line for line in named(problems(make(beside | {key: value}), 2 if key == "mesh.rep" else 1), key) if "has no effect" in line]


@pytest.mark.parametrize("values", [
    {"data.text_key": "body", "data.train": "a.jsonl"},
    {"data.text_key": "body", "data.validation": {"folder": 1.0}},
    {"train.sample_prompt": "Once"},
    {"train.eval_every": 0} | NO_VALIDATION,  # says what is so
    {"train.stop_after": 180},
    {"pipeline.chunks": 1},
    {"layout.attention": "cudnn_packed", "data.max_documents": 3},
    {"data.validation": __file__} | NO_VALIDATION,
    {"train.eval_rows": 7, "data.validation": __file__},
    {"checkpoint.keep_best": 1} | SAVED,
    {"precision.loss_scale_init": 8.0},  # auto may be fp16
])  # fmt: skip
def test_what_has_an_effect_is_not_refused(values):
    assert not [line for line in problems(make(values), 1) if "no effect" in line]


# ---------------------------------------------------------------- a module of one's own
# What it reads: all else is refused. A pattern stands for keys that are read one and all.
BY_THE_STEP = ("mesh.rep", "mesh.dp", "layout.zero", "pipeline.microbatch", "optim.[!m]*", "optim.momentum", "precision.reduce",
               "precision.matmul", "data.global_batch", "train.steps", "train.seed")
BY_THE_RUN = ("model.module", "model.loss", "optim.max_skipped_updates", "data.source", "data.validation_fraction", "data.prefetch",
              "train.stop_after", "train.eval_*", "train.log_every", "train.out", "checkpoint.*", "record.*", "guard.*", "distributed.*",
              "emulate", "show_layout")


def matching(patterns: tuple[str, ...]) -> set[str]:
    unknown = [pattern for pattern in patterns if not any(fnmatch(key, pattern) for key in KEYS)]
    assert not unknown, unknown
    return {key for key in KEYS if any(fnmatch(key, pattern) for pattern in patterns)}


def other(key: str) -> object:
    """A value in range that is not the default."""
    default, words = KEYS[key].default, KEYS[key].type_name
    if key in CHOICES:
        return next(name for name in CHOICES[key] if name != default)
    if "true or false" in words:
        return not default
    if "number" in words and "names" not in words:
        return 2 if default is None else default / 2 or 0.5 if isinstance(default, float) else default + 1
    return "x"


def test_a_module_reads_these_options_and_refuses_all_others_by_name():
    refused = {key for key in KEYS
               if [line for line in named(problems(make(MODULE | {key: other(key)}), 1), key) if "a module of your own" in line]}
    assert refused == set(KEYS) - matching(BY_THE_STEP) - matching(BY_THE_RUN)


def test_a_loop_of_ones_own_reads_these_options_and_refuses_what_only_a_run_reads():
    refused = {key for key in KEYS if named(unread_by_engine(make({key: other(key)}), draws_weights=True), key)}
    assert refused == matching(BY_THE_RUN)
    [line] = unread_by_engine(make({"train.seed": 1}), draws_weights=False)
    assert line.startswith("train.seed=1 has no effect on jaxmeg.initialize")
    assert list(unread_by_engine(make({}), draws_weights=False)) == []


def test_a_value_of_several_lines_is_one_line():
    [line] = problems(make(MODULE | {"train.sample_prompt": "Once\nupon"}), 1)
    [text] = problems(make({"train.sample_prompt": "Once\nupon", "train.sample_tokens": 0}), 1)
    assert "\n" not in line + text


@pytest.mark.parametrize(("values", "key"), [
    (NO_VALIDATION | SAVED | {"checkpoint.keep_best": 1}, "checkpoint.keep_best"),
    (NO_VALIDATION | SAVED | {"checkpoint.keep_best": 1}, "checkpoint.keep_best"),
    ({"data.packing": "concat", "data.long_documents": "drop"}, "data.long_documents"),
    ({"data.packing": "nonsense"}, "data.packing"),
    ({"precision.compute": "fp32", "precision.loss_scale_init": 8.0}, "precision.loss_scale_init"),
])  # fmt: skip
def test_one_line_a_mistake_with_a_module(values, key):
    assert len(named(problems(make(MODULE | values), 1), key)) == 1


def test_a_source_that_is_given_as_an_object_needs_no_module_in_the_config():
    """`run(config, module=Net, ...)` with the other two as import paths: `own_setup` checks such a config."""
    from jaxmeg.validate import module_rules

    assert module_rules.problems(make({"data.source": "a:b", "model.loss": "a:c"}), 1) == []


# ---------------------------------------------------------------- known when jax runs
HERE = {"own": False, "compute": "fp16", "platform": "gpu", "num_devices": 4, "num_processes": 2}


@pytest.mark.parametrize(("key", "value", "here"), [
    ("model.max_seq_len", 64, {}),
    ("precision.loss_scale_init", 8.0, {"compute": "bf16"}),
    ("precision.loss_scale_growth_interval", 5, {"compute": "fp32"}),
    ("record.compile_cache", "/tmp/cache", {"platform": "cpu"}),
    ("guard.replicas_every", 7, {"num_devices": 1}),
    ("guard.silent_seconds", 70, {"num_processes": 1}),
    ("distributed.timeout", 70, {"num_processes": 1}),
])  # fmt: skip
def test_options_that_are_not_read_here_are_warned_of(key, value, here):
    [line] = unread(make({key: value}), **HERE | here)
    assert line.startswith(f"{key}={value} has no effect with ")
    assert list(unread(make({}), **HERE | here)) == []
    if here:
        assert list(unread(make({key: value}), **HERE)) == []


@pytest.mark.parametrize(("key", "value"), [("train.eval_rows", 7), ("train.eval_every", 7)])
def test_evaluation_without_rows_is_warned_of(key, value):
    [line] = unread(make({key: value} | NO_VALIDATION), **HERE)
    assert line == f"{key}={value} has no effect with data.validation_fraction=0"


def test_what_is_read_here_is_not_warned_of():
    [line] = unread(make({"train.out": "runs/b", "checkpoint.resume": "runs/a"}), **HERE)
    assert line == "train.out=runs/b has no effect with checkpoint.resume=runs/a, which goes on in the run's own folder"
    assert list(unread(make({"train.out": "runs/a", "checkpoint.resume": "runs/a"}), **HERE)) == []
    assert list(unread(make({"train.out": "runs/a"}), **HERE)) == []
    assert list(unread(make({"model.max_seq_len": 256, "model.positions": "learned"}), **HERE)) == []
    off = make({"guard.replicas_every": 0, "record.compile_cache": None})
    assert list(unread(off, **HERE | {"num_devices": 1, "platform": "cpu"})) == []


# ---------------------------------------------------------------- a config made in Python
TOY = {"model.preset": "toy", "model.num_layers": 1, "data.seq_len": 16, "data.global_batch": 4, "mesh.dp": 1}


@pytest.mark.parametrize(("values", "message"), [
    ({"pipeline.microbatch": 3}, r"pipeline.microbatch=3 does not divide the 4 rows"),
    ({"data.text_key": "body", "optim.lr": 0.0}, r"optim.lr=0.0 is out of range.*\ndata.text_key=body has no effect"),
    ({"emulate": 4}, r"emulate=4 has no effect on a jax that runs on 1 cpu devices: leave emulate out"),
    ({"distributed.coordinator": "a:1", "distributed.num_processes": 2, "distributed.process_id": 0},
     r"distributed.num_processes=2 has no effect on a jax of 1 processes"),
])  # fmt: skip
def test_it_is_checked_as_one_of_the_command_line_is(values, message):
    with pytest.raises(ConfigError, match=message):
        text_task(make(TOY | values), jax.devices()[:1])


def test_its_warnings_are_given_once(capsys):
    text_task(make(TOY | {"model.max_seq_len": 64, "precision.loss_scale_init": 8.0}), jax.devices()[:1])
    assert capsys.readouterr().err.splitlines() == [
        "warning: model.max_seq_len=64 has no effect with model.positions=rope, which needs no table",
        "warning: precision.loss_scale_init=8.0 has no effect with precision.compute=auto, which is fp32 here"]


def test_a_run_to_go_on_with_is_not_named_in_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("checkpoint: {resume: runs/demo}\n")
    with pytest.raises(ConfigError) as caught:
        config_of(path)
    assert caught.value.lines == [f"{path}: checkpoint.resume=runs/demo in a file does not start from that run's config: leave it out, and "
                                  "write --resume runs/demo"]
    path.write_text("checkpoint: {resume: null}\n")
    assert config_of(path).checkpoint.resume is None


@pytest.mark.parametrize(("values", "given", "message"), [
    ({"model.module": "a:b"}, {"module": dict}, "model.module=a:b has no effect beside the module that run"),
    ({"data.source": "a:b"}, {"module": dict, "loss": dict, "data": []}, "data.source=a:b has no effect beside the source that run"),
    ({}, {"loss": dict}, "run\\(\\) was given loss or data without a module"),
    ({}, {"data": []}, "run\\(\\) was given loss or data without a module"),
])
def test_what_run_is_given_twice_or_for_nothing_is_refused(tmp_path, values, given, message):
    with pytest.raises(ConfigError, match=message):
        run(make({"train.out": str(tmp_path / "run")} | values), **given)
