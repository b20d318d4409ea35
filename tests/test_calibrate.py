"""Rates measured on a machine: that they are measured, written, read, and that a plan is made with them."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest
import yaml

from jaxmeg import cli
from jaxmeg.planner import calibrate
from jaxmeg.planner.calibrate import KEYS, RatesError, measure, read_rates
from jaxmeg.planner.chips import known_chips, parse_cluster
from jaxmeg.planner.rates import rates_of
from jaxmeg.planner.search import judge
from jaxmeg.setup import build

TINY = ["--model", "toy", "--model.num_layers", "1", "--seq_len", "32", "--global_batch", "2"]


def test_every_rate_is_measured_and_is_one_of_the_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LARGE", 2**20)
    monkeypatch.setattr(calibrate.roof, "SECONDS", 0.001)
    said: list[str] = []
    found = measure(build(cli.read([*TINY, "--mesh", "dp=2"]), jax.devices()[:2]), said.append)
    assert found.keys() == set(KEYS) and all(value > 0 for name, value in found.items() if name != "hop")
    assert said == ["matrices and attention", "memory", "the host", "links"]
    path = tmp_path / "rates.yaml"
    path.write_text(yaml.safe_dump({"rates": found}))
    assert read_rates(str(path)) == found


def test_a_plan_with_measured_rates_takes_them() -> None:
    """Twice the rate of matmuls: half their time, and nothing else changes."""
    chip = known_chips()["H200"]
    usual = rates_of(chip, 128)
    twice = rates_of(chip, 128, measured={"matmul_tflops": 2 * usual.matmul_tflops})
    assert twice == replace(usual, matmul_tflops=2 * usual.matmul_tflops, measured=True)
    config = cli.read(["--model", "llama3.1-8b", "--seq_len", "4096", "--global_batch", "8", "--mesh", "tp=8"])
    slow, fast = (judge(config, parse_cluster("8xH200"), rates).speed for rates in (usual, twice))
    assert fast.part("matmuls") == pytest.approx(slow.part("matmuls") / 2)
    assert [part.seconds for part in fast.parts[1:]] == [part.seconds for part in slow.parts[1:]]


@pytest.mark.parametrize(("content", "says"), [
    ("{}", "holds no rates"), ("rates: 3", "holds no rates"), ("rates: {speed: 3}", "unknown rate speed: it may hold"),
    ("rates: {matmul_tflops: fast}", "matmul_tflops=fast is not a positive number"), ("rates: {latency: 0}", "latency=0 is not a positive"),
    ("rates: [", "is not valid YAML"), (None, "cannot be read"),
])
def test_a_bad_file_of_rates_is_one_line(content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RatesError, match=says) as refused:
        read_rates(str(path))
    assert "\n" not in str(refused.value)
