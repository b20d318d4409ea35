"""The command line: short forms, unknown keys with the nearest ones, types, and answers within seconds, without jax."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmeg import cli, devices
from jaxmeg.config import Config, MeshConfig
from jaxmeg.devices import Devices, plan_devices
from jaxmeg.keys import KEYS, OTHER_NAMES, SHORT_FORMS
from jaxmeg.processes.find import Processes

ROOT = Path(__file__).resolve().parents[1]


def parse_line(line: str) -> Config:
    """The config of a command line."""
    return cli.parse(line.split())


def errors(capsys, argv: list[str]) -> list[str]:
    """The lines that a command line with mistakes prints."""
    with pytest.raises(SystemExit) as exit_info:
        cli.parse(argv)
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("error: ") for line in err.splitlines()]


def test_no_arguments_are_the_defaults():
    assert cli.parse([]) == Config()


def test_short_forms_stand_for_keys():
    short = parse_line(
        "--mesh tp=4,pp=2 --zero 3 --schedule interleaved --chunks=2 --microbatch 2 --remat full --model llama3.1-8b "
        "--steps 5 --lr 3e-4 --seq_len 64 --global_batch 16 --out x --precision bf16 --emulate 8 --show_layout"
    )
    full = parse_line(
        "--mesh.tp 4 --mesh.pp=2 --layout.zero=3 --pipeline.schedule interleaved --pipeline.chunks 2 "
        "--pipeline.microbatch=2 --layout.remat full --model.preset=llama3.1-8b --train.steps 5 --optim.lr 0.0003 "
        "--data.seq_len 64 --data.global_batch 16 --train.out x --precision.compute bf16 --emulate=8 "
        "--show_layout true"
    )
    assert short == full
    assert (short.mesh.tp, short.mesh.pp, short.layout.zero, short.optim.lr) == (4, 2, 3, 3e-4)
    assert short.show_layout


def test_tables_name_keys_that_exist():
    assert set(SHORT_FORMS.values()) <= set(KEYS)
    assert set(OTHER_NAMES.values()) <= set(KEYS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--lr_warmpup=10", "unknown key lr_warmpup: did you mean optim.warmup?"),
        ("--optimizer.lr_peak 3e-4", "unknown key optimizer.lr_peak: did you mean optim.lr?"),
        ("--mesh tp=4,xx=2", "--mesh tp=4,xx=2: unknown axis xx: use pp, rep, dp, ep, cp or tp"),
        ("--mesh tp=4,tpp=2", "--mesh tp=4,tpp=2: unknown axis tpp: did you mean tp? use pp, rep, dp, ep, cp or tp"),
        ("--mesh tp=4,tp=2", "--mesh tp=4,tp=2: axis tp is named twice: name it once"),
        ("--mesh tp=0", "--mesh tp=0: tp=0 is not a size: use a whole number of 1 or more"),
        ("--mesh tp=a", "--mesh tp=a: tp=a is not a size: use a whole number of 1 or more"),
        ("--mesh tp=2,auto", "--mesh tp=2,auto: only scripts/train.py chooses a mesh: name one; scripts/plan.py ranks them"),
        ("--mesh 4", "--mesh 4: '4' is not axis=size: write for example tp=4,pp=2"),
        ("--optim.lr=fast", "optim.lr=fast has the wrong type: give a number"),
        ("--steps 1.5", "train.steps=1.5 has the wrong type: give a whole number"),
        ("--mesh.dp few", "mesh.dp=few has the wrong type: give a whole number or null"),
        ("--learning_rate 1", "unknown key learning_rate: did you mean optim.lr?"),
        ("--seq-len 1", "unknown key seq-len: did you mean data.seq_len?"),
        ("--mesh.zzzz 1", "unknown key mesh.zzzz: the keys of mesh are pp, rep, dp, ep, cp, tp"),
        ("--hjkl 1", "unknown key hjkl: --help lists all keys; the sections are model, mesh, layout,"),
        ("--optim 1", "optim is a section, not a value: give one of its keys, for example optim.name"),
        ("--lr", "--optim.lr has no value: write --optim.lr VALUE"),
        ("demo.yaml", "demo.yaml stands alone: write --config demo.yaml"),
        ("pp=2", "pp=2 stands alone: write --mesh pp=2, with commas and no spaces between axes"),
        ("optim.lr=1", "optim.lr=1 stands alone: write --optim.lr=1"),
        ("--config no.yaml", "--config no.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_one_mistake_is_one_line(capsys, argv, message):
    (line,) = errors(capsys, argv.split())
    assert line.startswith(message)


def test_all_mistakes_come_at_once(capsys):
    line = "--lr_warmpup=10 --optimizer.lr_peak 1 --mesh tp=4,xx=2 --lr x --steps 1.5"
    assert len(errors(capsys, line.split())) == 5


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr_warmpup: 10", "unknown key lr_warmpup: did you mean optim.warmup?"),
        ("optimizer:\n  lr_peak: 1", "unknown key optimizer.lr_peak: did you mean optim.lr?"),
        ("mesh:\n  xx: 2", "unknown key mesh.xx: the keys of mesh are pp, rep, dp, ep, cp, tp"),
        ("zero: 3", "unknown key zero: did you mean layout.zero?"),
        ("optim: 3", "optim is a section, not a value: give one of its keys, for example optim.name"),
        ("optim:\n  lr: fast", "optim.lr=fast has the wrong type: give a number"),
        ("data:\n  seq_len: 1.5", "data.seq_len=1.5 has the wrong type: give a whole number"),
        ("mesh:\n  tp: 2\n  tp: 4", "is not valid YAML: key tp is given twice"),
        ("mesh:\n  tp: 2\n pp: 4", "is not valid YAML: while parsing"),
        ("- 1", "holds no sections: write for example `optim: {lr: 0.001}`"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(capsys, tmp_path, text, message):
    path = write(tmp_path, text)
    (line,) = errors(capsys, ["--config", path])
    assert line.removeprefix("--config ").startswith(f"{path}: {message}")


def test_the_command_line_wins_over_files(tmp_path):
    path = write(tmp_path, "optim:\n  lr: 3e-4\n  warmup: 5\n")
    for argv in (["--config", path, "--lr", "1.0"], ["--lr", "1.0", "--config", path]):
        config = cli.parse(argv)
        assert (config.optim.lr, config.optim.warmup) == (1.0, 5)
    assert cli.parse(["--config", path]).optim.lr == 3e-4
    assert cli.parse(["--config", write(tmp_path, "# only comments\n")]) == Config()


def test_resume_stands_on_the_config_of_the_run(tmp_path):
    """What belongs to one start does not come back; another mesh brings its own pipeline options; the run keeps its folder."""
    saved = ("optim: {lr: 0.002}\nmesh: {pp: 2, tp: 2}\npipeline: {schedule: interleaved, chunks: 2}\nemulate: 4\n"
             "train: {stop_after: 5, out: elsewhere}\ncheckpoint: {init_from: old}\ndistributed: {num_processes: 2}\n")
    folder = Path(write(tmp_path, saved)).rename(tmp_path / "config.yaml").parent
    with pytest.raises(cli.ConfigError, match=r"checkpoint.resume=nowhere is not the folder of a run: it has no config.yaml"):
        cli.read(["--resume", "nowhere"])
    same = cli.parse(["--resume", str(folder)])
    assert (same.optim.lr, same.mesh.pp, same.pipeline.schedule, same.train.out) == (0.002, 2, "interleaved", str(folder))
    assert (same.emulate, same.train.stop_after, same.checkpoint.init_from, same.distributed.num_processes) == (None, None, None, None)
    other = cli.parse(["--mesh", "dp=4", "--resume", str(folder), "--lr", "1e-3"])
    assert (other.mesh.pp, other.mesh.dp, other.pipeline.schedule, other.pipeline.chunks, other.optim.lr) == (1, 4, None, None, 1e-3)
    assert cli.parse(["--mesh", "pp=4", "--schedule", "gpipe", "--resume", str(folder)]).pipeline.schedule == "gpipe"


def test_a_mesh_to_be_chosen_is_taken_out_of_the_command_line():
    assert cli.take_auto(["--zero", "3", "--mesh", "auto"]) == (["--zero", "3"], True)
    assert cli.take_auto(["--mesh=tp=2,auto", "--lr", "1"]) == (["--mesh.tp=2", "--lr", "1"], True)
    assert cli.take_auto(["--mesh", "tp=2,dp=4"]) == (["--mesh=tp=2,dp=4"], False)
    assert cli.given_keys(["--mesh.tp=2", "--zero", "3"]) == {"mesh.tp", "layout.zero"}


def test_a_mesh_on_the_command_line_is_the_whole_mesh(tmp_path):
    path = write(tmp_path, "mesh: {pp: 2, tp: 2, dp: 2}\n")
    mesh = cli.parse(["--config", path, "--mesh", "tp=4"]).mesh
    assert (mesh.pp, mesh.tp, mesh.dp) == (1, 4, None)


def test_config_from_dotted_keys(tmp_path):
    config = cli.config_of({"mesh.dp": 4, "optim.lr": 1e-3, "data.train": {"a": 3, "b": 1}, "record.tensorboard": False, "train.out": "x"})
    assert (config.mesh.dp, config.optim.lr, config.data.train, config.record.tensorboard) == (4, 1e-3, {"a": 3.0, "b": 1.0}, False)
    assert cli.config_of(write(tmp_path, "optim: {lr: 0.5}\n")).optim.lr == 0.5
    with pytest.raises(cli.ConfigError, match=r"(?s)unknown key mesh\.dq.*optim is a section"):
        cli.config_of({"mesh.dq": 1, "optim": 3})


def test_printed_config_reads_back(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_info:
        cli.parse(["--zero", "2", "--mesh", "tp=2,dp=4", "--print_config"])
    assert exit_info.value.code == 0
    config = cli.parse(["--config", write(tmp_path, capsys.readouterr().out)])
    assert config == cli.parse(["--zero", "2", "--mesh", "tp=2,dp=4"])


def test_help_shows_every_key_with_its_text(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.parse(["--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in KEYS.values():
        assert f"--{key.name}" in text
        assert " ".join(key.doc.split()[:3]) in text
    assert "--mesh tp=4,pp=2" in text


def test_check_prints_every_problem(capsys):
    config = parse_line("--mesh tp=4,dp=4 --model.num_heads 6 --model.num_kv_heads 2 --global_batch 19 --lr 0")
    with pytest.raises(SystemExit) as exit_info:
        cli.check(config, 16)
    assert exit_info.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_check_prints_warnings(capsys):
    sizes = cli.check(parse_line("--mesh pp=4 --global_batch 2"), 4)
    assert sizes.num_microbatches == 2
    assert capsys.readouterr().err.startswith("warning: 2 microbatches are fewer than mesh.pp=4 stages")


@pytest.mark.parametrize("index", [0, 1])
def test_one_of_several_processes_says_what_concerns_all(monkeypatch, capsys, index):
    monkeypatch.setattr(cli.os, "environ", {"NCCL_ASYNC_ERROR_HANDLING": "1"})
    config = parse_line("--mesh pp=4 --global_batch 2 --emulate 4 --distributed.coordinator a:1 --distributed.num_processes 2 "
                        f"--distributed.process_id {index}")
    assert cli.start(config).count == 4
    lines = capsys.readouterr().err.splitlines()
    expected = ["warning: 2 microbatches are fewer", "warning: NCCL_ASYNC_ERROR_HANDLING", "emulating 4 devices on the CPU"]
    assert len(lines) == (len(expected) if index == 0 else 0)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=False))


BAD_RUN = """
import sys
from jaxmeg import cli
from jaxmeg.devices import plan_devices
config = cli.parse(sys.argv[1:])
try:
    cli.check(config, plan_devices(config).count)
finally:
    assert not {"jax", "jaxlib", "flax", "numpy"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("argv", "num_lines"),
    [
        ("--mesh tp=4 --model.num_heads 6 --model.num_kv_heads 2 --model.mlp_dim 130 --seq_len 130", 3),
        ("--mesh dp=4 --global_batch 19", 1),
        ("--mesh pp=4 --model.num_layers 3 --lr 0 --zero 9", 3),
        ("--mesh tp=8,dp=2 --emulate 8", 1),
        ("--lr_warmpup=10 --optimizer.lr_peak 1", 2),
    ],
)
def test_a_bad_run_ends_in_seconds_without_jax(argv, num_lines):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-c", BAD_RUN, *argv.split()], capture_output=True, text=True, cwd=ROOT, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # of a core: the machine may be busy
    assert run.returncode == 2, run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == num_lines
    assert all(line.startswith("error: ") for line in lines)


# Counting devices.


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A stand-in for the root folder of a machine with some GPUs, on which jax has its plugin."""

    def make(num_gpus: int, lacks: str | None = None) -> Path:
        (tmp_path / "dev").mkdir()
        for number in range(num_gpus):
            (tmp_path / "dev" / f"nvidia{number}").touch()
        (tmp_path / "dev" / "nvidiactl").touch()
        monkeypatch.setattr(devices, "jax_lacks", lambda found: lacks if found else None)
        return tmp_path

    return make


def plan(config: Config, root: Path, **environ: str) -> tuple[int, bool, str | None]:
    planned: Devices = plan_devices(config, environ, root)
    return planned.count, planned.emulated, planned.message


def test_without_accelerators_the_mesh_is_emulated(machine):
    root = machine(0)
    assert plan(Config(), root) == (1, True, "no accelerator found: running on one CPU device")
    eight = Config(mesh=MeshConfig(tp=4, pp=2))
    assert plan(eight, root) == (8, True, "no accelerator found: emulating 8 devices on the CPU")
    assert plan(Config(emulate=4), root) == (4, True, "emulating 4 devices on the CPU")
    assert plan(Config(mesh=MeshConfig(tp=0)), root)[0] == 1  # refused later, with its own message


def test_accelerators_are_counted_not_emulated(machine, capsys):
    root = machine(2)
    assert plan(Config(), root) == (2, False, None)
    assert plan(Config(), root, CUDA_VISIBLE_DEVICES="1")[0] == 1
    assert plan(Config(emulate=8), root) == (8, True, "emulating 8 devices on the CPU")
    assert plan(Config(mesh=MeshConfig(tp=4)), root, JAX_PLATFORMS="cpu")[:2] == (4, True)
    assert plan_devices(Config(), {}, root, processes=Processes(count=4, index=0, origin="")).count == 8
    with pytest.raises(SystemExit):
        cli.check(Config(mesh=MeshConfig(tp=4)), plan(Config(mesh=MeshConfig(tp=4)), root)[0])
    assert capsys.readouterr().err == (
        "error: mesh tp=4 needs 4 devices, but there are 2 devices: use --mesh tp=2, dp=2 or pp=2, or --emulate 4\n"
    )


def test_gpus_that_jax_cannot_use_are_an_error(machine):
    """Never a silent run on the CPU of a GPU machine: emulation has to be asked for."""
    root = machine(2, lacks='pip install "jax[cuda13]"')
    planned = plan_devices(Config(mesh=MeshConfig(tp=2)), {}, root)
    assert planned.problem == (
        "2 nvidia accelerators found, but jax cannot use them: pip install \"jax[cuda13]\", or run on the CPU with --emulate 2"
    )
    assert plan_devices(Config(emulate=2), {}, root).problem is None

