"""Configs, command lines, meshes and rule tables of any content: a config that holds what it should, or errors of one line each.

Also that no YAML is code, and that what passes the rules really fits its mesh: counted here from the definitions.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax
import pytest
from fuzz import NUMBERS, SCALARS, SIZES, TEXTS, TREES, YAML_ODDITIES, as_yaml, assert_one_line, bomb, bounded, damaged, fuzz, listing
from hypothesis import given
from hypothesis import strategies as st

from jaxmeg import cli
from jaxmeg.config import Config, DataConfig, LayoutConfig, MeshConfig, ModelConfig, PipelineConfig, Resolved, resolve
from jaxmeg.keys import KEYS, SECTIONS, SHORT_FORMS, section_keys
from jaxmeg.rules import DEFAULT_RULES, read_rules
from jaxmeg.setup import build
from jaxmeg.state import abstract_state
from jaxmeg.validate.check import problems, warnings
from jaxmeg.validate.value_rules import RANGES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outcome(argv: list[str], num_devices: int = 8) -> Config | None:
    """A config and its problems, or None after errors; both well-formed."""
    with bounded():
        try:
            config = cli.read(argv)
        except cli.ConfigError as error:
            assert error.lines
            return None
        except SystemExit as stop:  # --help, --print_config
            assert stop.code == 0
            return None
        found = problems(config, num_devices)
        for line in found:
            assert "=" in line or ":" in line
        return None if found else config


@st.composite
def config_texts(draw: st.DrawFn) -> str:
    sections = draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=4))
    tree: dict[Any, Any] = {}
    for section in sections:
        names = st.one_of(st.sampled_from(section_keys(section)), TEXTS)
        tree[section] = draw(st.one_of(st.dictionaries(names, st.one_of(SCALARS, TREES), max_size=4), TREES))
    tree |= draw(st.dictionaries(st.one_of(st.sampled_from(sorted(KEYS)), TEXTS), TREES, max_size=2))
    text = as_yaml(tree)
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(sorted(KEYS)))
        section, _, leaf = key.rpartition(".")
        odd = draw(YAML_ODDITIES)
        text = f"{section}: {{{leaf}: {odd}}}\n" if section and draw(st.booleans()) else draw(st.sampled_from(["", text])) + odd
    return text


@fuzz(100)
@given(config_texts())
def test_any_yaml(here: Path, text: str) -> None:
    (here / "c.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    before = listing(here)
    outcome(["--config", "c.yaml"])
    assert listing(here) == before


GOOD = b"""# a comment
optim: {lr: 3e-4, warmup: 5}
mesh: &m {tp: 2, dp: 4}
data:
  train: {a: 1, b: 2.5}
train: {out: "runs/x", steps: 10}
"""


@fuzz(60)
@given(damaged(GOOD))
def test_a_damaged_config(here: Path, content: bytes) -> None:
    (here / "c.yaml").write_bytes(content)
    outcome(["--config", "c.yaml"])


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    names = st.one_of(st.sampled_from([*KEYS, *SHORT_FORMS, "mesh", "config", "resume"]), st.text(max_size=8))
    axes = st.lists(st.tuples(st.sampled_from(["pp", "rep", "dp", "ep", "cp", "tp", "xx", ""]), st.one_of(SIZES, TEXTS)), max_size=4)
    words = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(names)
        if name == "mesh":
            value = ",".join(f"{axis}={size}" for axis, size in draw(axes))
        else:
            value = str(draw(st.one_of(SCALARS, TREES, YAML_ODDITIES))) if name not in ("help", "print_config") else ""
        words += draw(st.sampled_from([[f"--{name}", value], [f"--{name}={value}"], [value], [f"--{name}"]]))
    return [word.replace("\0", "") for word in words]  # no argument can hold NUL


@fuzz(100)
@given(arguments())
def test_any_command_line(here: Path, argv: list[str]) -> None:
    before = listing(here)
    outcome(argv)
    assert listing(here) == before


@fuzz(50)
@given(st.dictionaries(st.sampled_from([*RANGES, "mesh.tp", "mesh.pp", "model.num_heads", "data.global_batch"]), NUMBERS, max_size=4))
def test_any_numbers(values: dict[str, Any]) -> None:
    outcome([f"--{key}={value}" for key, value in values.items()])


# ---------------------------------------------------------------- what passes
HEADS = [(8, 2), (4, 4), (4, 2), (6, 3), (8, 8), (6, 4)]
PIPELINES = [(None, None), (None, None), ("gpipe", None), ("gpipe", 2), ("1f1b", None), ("interleaved", None), ("interleaved", 3),
             (None, 2)]


@st.composite
def layouts(draw: st.DrawFn, most_devices: int = 64) -> tuple[Config, int]:
    """(config of a toy model, devices); about a third breaks no rule."""
    sizes = st.sampled_from([1, 1, 2, 3, 4])
    pp, rep, dp, tp = draw(st.tuples(sizes, st.sampled_from([1, 1, 2]), sizes, sizes).filter(lambda mesh: math.prod(mesh) <= most_devices))
    schedule, chunks = draw(st.sampled_from(PIPELINES)) if pp > 1 else (None, None)
    heads, kv_heads = draw(st.sampled_from(HEADS))
    microbatch = draw(st.sampled_from([None, 1, 2]))
    rows = rep * dp * (microbatch or 1) * draw(st.integers(1, 6)) + draw(st.sampled_from([0, 0, 0, 1]))
    config = Config(
        mesh=MeshConfig(pp=pp, rep=rep, dp=draw(st.sampled_from([dp, None])), tp=tp),
        layout=LayoutConfig(zero=draw(st.integers(0, 3)), remat=draw(st.sampled_from(["none", "selective", "full"]))),
        pipeline=PipelineConfig(schedule=schedule, chunks=chunks, microbatch=microbatch),
        model=ModelConfig(preset=draw(st.sampled_from(["toy", "toy-gpt2"])), num_layers=draw(st.sampled_from([None, 3, 6, 13])),
                          num_heads=heads, num_kv_heads=kv_heads, vocab_size=draw(st.sampled_from([None, 250, 7])),
                          mlp_dim=draw(st.sampled_from([24, 128])), tied=draw(st.sampled_from([None, True, False]))),
        data=DataConfig(seq_len=draw(st.sampled_from([12, 16])), global_batch=rows))
    return config, pp * rep * dp * tp + draw(st.sampled_from([0, 0, 0, 1]))


def assert_fits(config: Config, sizes: Resolved, num_devices: int) -> None:
    """What must be true of a layout that is not refused, from the definitions."""
    mesh, arch = {str(axis): size for axis, size in sizes.mesh.items()}, sizes.arch
    assert math.prod(mesh.values()) == num_devices
    assert all(getattr(config.mesh, axis) in (None, size) for axis, size in mesh.items())
    rows = mesh["rep"] * mesh["dp"] * sizes.num_microbatches * sizes.microbatch
    assert rows == config.data.global_batch
    assert arch.num_heads % mesh["tp"] == arch.mlp_dim % mesh["tp"] == config.data.seq_len % mesh["tp"] == 0
    assert arch.num_heads % arch.num_kv_heads == 0
    pieces = mesh["pp"] * sizes.chunks
    assert len(sizes.layer_split) == pieces and sum(sizes.layer_split) == arch.num_layers and min(sizes.layer_split) >= 1
    assert sizes.padded_vocab >= arch.vocab_size and sizes.padded_vocab % (mesh["pp"] * mesh["tp"]) == 0
    assert 0 <= sizes.bubble < 1


@fuzz(300)
@given(layouts())
def test_what_passes_the_rules_fits_its_mesh(layout: tuple[Config, int]) -> None:
    config, num_devices = layout
    if problems(config, num_devices):
        return
    sizes = resolve(config, num_devices)
    assert_fits(config, sizes, num_devices)
    for line in warnings(config, num_devices):
        assert_one_line(line)


@fuzz(30)
@given(layouts(most_devices=8))
def test_what_passes_the_rules_can_be_set_up(layout: tuple[Config, int]) -> None:
    """Every layer in exactly one memory row, the schedule replayed, every leaf placed; nothing is compiled."""
    config, num_devices = layout
    if problems(config, num_devices) or num_devices > len(jax.devices()):
        return
    setup = build(config, jax.devices()[:num_devices])
    rows = [int(layer) for layer in setup.layer_of_row.reshape(-1) if layer >= 0]
    assert sorted(rows) == list(range(setup.resolved.arch.num_layers))
    assert setup.table.num_microbatches == setup.resolved.num_microbatches
    leaves = jax.tree.leaves(abstract_state(setup))
    assert all(leaf.sharding.shard_shape(leaf.shape) for leaf in leaves if leaf.shape)


# ---------------------------------------------------------------- rule tables
@fuzz(80)
@given(st.one_of(st.dictionaries(st.one_of(st.sampled_from(sorted(DEFAULT_RULES)), TEXTS), st.one_of(
    st.lists(st.sampled_from(["pp", "rep", "dp", "ep", "cp", "tp", "x"]), max_size=3), TREES), max_size=4).map(as_yaml), YAML_ODDITIES))
def test_any_rule_table(here: Path, text: str) -> None:
    (here / "rules.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    with bounded():
        table, found = read_rules("rules.yaml")
    assert table.keys() == DEFAULT_RULES.keys()
    for dim, axes in table.items():
        assert set(axes) <= set(DEFAULT_RULES[dim])
    assert table == dict(DEFAULT_RULES) or not found
    for line in found:
        assert_one_line(line)


# ---------------------------------------------------------------- what was found
def error_of(here: Path, text: str) -> str:
    (here / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(cli.ConfigError) as error:
        cli.read(["--config", "c.yaml"])
    return str(error.value)


@pytest.mark.parametrize("payload", [
    "!!python/object/apply:os.system ['touch MARKER']", "!!python/object/new:os.system ['touch MARKER']",
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['MARKER']]", "!!python/name:os.system"])
@pytest.mark.parametrize("frame", ["{}", "optim: {{lr: {}}}", "heads: {}", "? {}\n: 1"])
def test_no_yaml_is_code(here: Path, payload: str, frame: str) -> None:
    (here / "c.yaml").write_text(frame.format(payload))
    before = listing(here)
    assert outcome(["--config", "c.yaml"]) is None
    assert outcome(["--layout.rules", "c.yaml"]) is None
    for key in ("data.train", "optim.lr", "train.out"):
        outcome([f"--{key}", payload])
    assert listing(here) == before


@pytest.mark.parametrize(("text", "line"), [
    ("!!map foo", "expected a mapping node, but found scalar"),
    ("optim: {lr: !!int foo}", "invalid literal for int() with base 10: 'foo'"),
    ("optim: {lr: !!bool x}", "'x'"),
    ("train: {out: 2001-99-99}", "month must be in 1..12"),
    ("a: !!timestamp x", "no attribute 'groupdict'"),
    ("[" * 20000, "it is nested too deeply"),
    (bomb() + "optim: {lr: *l29}", "it holds more than 10,000 values"),
    ("optim: &a {lr: *a}", "it holds more than 10,000 values"),
    ("a: &a {k0: 1}\n" + "".join(f"{k}: &{k} {{<<: [{', '.join(9 * [f'*{chr(ord(k) - 1)}'])}]}}\n" for k in "bcdefgh"),
     "it holds more than 10,000 values"),
    ("optim: {warmup: " + "9" * 5000 + "}", "Exceeds the limit (4300 digits)"),
])
def test_yaml_that_is_none_is_one_line(here: Path, text: str, line: str) -> None:
    found = error_of(here, text)
    assert found.startswith("--config c.yaml: is not valid YAML: ") and line in found
    assert_one_line(found)


@pytest.mark.parametrize(("text", "line"), [
    ("optim: {lr: " + "9" * 400 + "}", "c.yaml: optim.lr=" + "9" * 200 + "... has the wrong type: give a number"),
    ("optim: {warmup: " + "9" * 400 + "}", "optim.warmup=" + "9" * 200 + "... is out of range: use a number of at most 18 digits"),
    ("optim: {warmup: 0x" + "f" * 5000 + "}", "optim.warmup=a number of thousands of digits is out of range"),
    ("optim: {lr: [[[1]]]}", "c.yaml: optim.lr=[[[1]]] has the wrong type: give a number"),
    ('model: {"a\\nb": 1}', "c.yaml: unknown key model.a\\nb"),
])
def test_values_that_no_option_holds(here: Path, text: str, line: str) -> None:
    assert error_of(here, text).startswith(line)


@pytest.mark.parametrize("value", [bomb(), "&a [*a]", "&a {b: *a}"])
def test_yaml_that_repeats_itself_on_the_command_line(value: str) -> None:
    for key in ("data.train", "optim.lr"):
        with pytest.raises(cli.ConfigError, match="has the wrong type"):
            cli.read([f"--{key}={value}"])


@pytest.mark.parametrize("size", ["²", "9" * 5000, "-1", ""])
def test_sizes_of_a_mesh_that_are_none(size: str) -> None:
    with pytest.raises(cli.ConfigError, match="is not a size: use a whole number of 1 or more"):
        cli.read(["--mesh", f"tp={size}"])


@pytest.mark.parametrize(("argv", "line"), [
    (["--model.num_heads", "9" * 18], "model.num_heads=999999999999999999 is out of range: use 1 or more, up to 16,777,216"),
    (["--seq_len", "9" * 18, "--mesh", "tp=8"], "data.seq_len=999999999999999999 is out of range"),
    (["--model.num_layers", "1" + "0" * 12], "model.num_layers=1000000000000 is out of range: use 1 or more, up to 100,000"),
    (["--chunks", "1" + "0" * 12, "--schedule", "interleaved", "--mesh", "pp=8"], "pipeline.chunks=1000000000000 is out of range"),
    (["--global_batch", "1" + "0" * 12, "--mesh", "pp=2,dp=4"], "data.global_batch=1000000000000 is out of range"),
    (["--global_batch", "65536", "--microbatch", "1", "--mesh", "dp=1"],
     "pipeline.microbatch=1 makes 65,536 microbatches of the 65,536 rows of a data-parallel rank, and a step has at most 16,384: "
     "use microbatch 4 or more, or a smaller global_batch"),
    (["--mesh", "tp=65536,pp=65536"], "mesh pp=65536,tp=65536 needs 4,294,967,296 devices, more than there can be"),
    (["--lr", "1e300"], "optim.lr=1e+300 is out of range: use a number above 0"),
    (["--train.seed", str(2**32)], "train.seed=4294967296 is out of range: use 0 or more, up to 4,294,967,295"),
    (["--data", "a" * 5000], "data.train=" + "a" * 5000 + " does not exist"),
    (["--resume", "a" * 5000], "checkpoint.resume=" + "a" * 200 + "... is not the folder of a run"),
    (["--data={}"], "data.train is an empty table: give a path, or paths with weights"),
    (["--data={1: 2}"], "data.train={1: 2.0} has the wrong type: give text, names with numbers or null"),
    (["--global_batch", "null"], "data.global_batch=null has the wrong type: give a whole number"),
    (["--train.sample_prompt", "\udcff"], "train.sample_prompt=\\udcff holds NUL or bytes that are not UTF-8"),
    (["--out", "a\0b"], "train.out=a\\x00b holds NUL or bytes that are not UTF-8"),
])
def test_values_that_would_hang_or_crash_later(argv: list[str], line: str) -> None:
    with bounded():
        try:
            found = problems(cli.read(argv), 8)
        except cli.ConfigError as error:
            found = error.lines
    assert any(problem.startswith(line) for problem in found), found


def test_a_home_folder_in_a_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has spelled it out there."""
    monkeypatch.setenv("HOME", str(here))
    (here / "a.txt").write_text("text")
    (here / "c.yaml").write_text("data: {train: ~/a.txt}\n")
    assert problems(cli.read(["--config", "c.yaml"]), 1) == []


@pytest.mark.parametrize("value", ["pipe", "folder", "loop"])
@pytest.mark.parametrize("key", ["config", "layout.rules", "pipeline.schedule", "data.train", "data.tokenizer"])
def test_what_is_no_file_is_not_read(here: Path, value: str, key: str) -> None:
    path = here / (value + ".csv" * (key == "pipeline.schedule"))
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "loop": lambda: path.symlink_to(path)}[value]()
    with bounded():
        assert outcome([f"--{key}={path}", "--mesh", "pp=2,dp=4"]) is None or (key, value) == ("data.train", "folder")


def test_errors_are_one_line_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--data.train.\x1b[2Jx\n", "1"])
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "\x1b" not in shown and shown.startswith("error: ")
