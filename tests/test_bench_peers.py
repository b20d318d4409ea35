"""Peers of the bench: what they say is counted as ours, what cannot run is a result, and the yardstick computes the model."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxmeg.arch import PRESETS
from jaxmeg.bench import peer, report, schema
from jaxmeg.bench.case import PEERS, read_plan
from jaxmeg.bench.peers import plain_jax
from jaxmeg.flops import train_flops_per_token

CASE = read_plan(["--model", "toy", "--seq_len", "32", "--global_batch", "4", "--group", "g"]).cases[0]
TOY = PRESETS["toy"]


def test_what_a_peer_says_is_counted_as_our_own_step():
    said = {"seconds": [0.2, 0.1, 0.4], "losses": [3.0, 2.0, 1.0, 0.5], "peak_bytes": 2**30, "compile_s": 9.0,
            "versions": {"torch": "2"}, "notes": []}
    found = peer.result(peer.Heard("transformers", CASE, TOY, said), 0.5)
    assert found["step_s"]["median"] == 0.2 and found["tokens_per_s"] == 640 and found["loss"] == {"first": 3.0, "last": 0.5}
    np.testing.assert_allclose([found["step_s"]["p5"], found["step_s"]["p95"]], np.percentile(said["seconds"], [5, 95]))
    assert found["mfu"] == pytest.approx(640 * train_flops_per_token(TOY, 32) / 0.5e12)
    assert peer.result(peer.Heard("x", CASE, TOY, said | {"seconds": [0.1]}), None)["mfu"] is None
    ours = found | {"kind": "jaxmeg", "roof": {"seconds": 0.05, "share": 0.9, "note": None}}
    other = found | {"workload": found["workload"] | {"rows": 8}}
    first, second, third = peer.with_roofs([ours, found, other])
    assert (first["roof"]["share"], second["roof"]["share"], third["roof"]["share"]) == (0.9, 0.25, None)


def test_a_peer_that_cannot_run_is_a_result():
    absent = peer.Peer(file="maxtext.sh", packages=("no_such_package", "jax"))
    assert peer.cannot(absent, TOY, 1) == "no_such_package is not installed, see jaxmeg/bench/peers/maxtext.sh"
    ceiling = peer.PEERS["ceiling"]
    assert peer.cannot(ceiling, TOY, 1) is None and "this layout has 2" in (peer.cannot(ceiling, TOY, 2) or "")
    assert "Llama's shape" in (peer.cannot(ceiling, PRESETS["toy-gpt2"], 1) or "")
    found = peer.result(peer.Heard("maxtext", CASE, TOY, {"error": "not run: x"}), 1.0)
    assert report.line(found) == "maxtext, 4 x 32: not run: x" and not list(schema._against(found, schema.CASE, ""))
    assert set(PEERS) == set(peer.PEERS) and all((peer.FOLDER / one.file).is_file() for one in peer.PEERS.values())


@pytest.mark.parametrize(("out", "err", "wanted"), [
    ('noise\n{"error": "no GPU"}\n', "", {"error": "no GPU"}),
    ('{"seconds": []}\n', "warning\nMemoryError\n", {"error": "exit code 3: MemoryError"}),
    ("", "Traceback\nKilled\n", {"error": "exit code 3: Killed"}),
    ("{not json}\n", "", {"error": "exit code 3: {not json}"}),
    ("", "", {"error": "exit code 3: it said nothing"}),
])
def test_the_line_of_a_peer(out, err, wanted):
    assert peer.read_line(out, err, 3) == wanted


@pytest.mark.parametrize(("log", "wanted"), [
    ("I0811 metric_logger.py:226] completed step: {n}, seconds: 0.{n}00, TFLOP/s/device: 5.2, total_weights: 15, loss: 1{n}.5, lm_loss: 7",
     {"seconds": [0.3, 0.4, 0.5], "losses": [11.5, 12.5, 13.5, 14.5, 15.5], "peak_bytes": None, "compile_s": 0.1,
      "notes": ["compile time is that of the first step"], "versions": {"maxtext": "0.2.5", "jax": jax.__version__}}),
    ("ValueError: no such thing", {"error": "ValueError: no such thing"}),
])
def test_the_script_for_maxtext(log, wanted, tmp_path):
    """With a stand-in of the package that logs as it does."""
    package = tmp_path / "maxtext" / "trainers" / "pre_train"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    said = "\n".join(log.replace("{n}", str(n)) for n in range(1, 6))
    (package / "train.py").write_text(f"import sys\nassert {{'base_emb_dim=64', 'steps=5'}} <= {{*sys.argv}}\nprint({said!r})\n")
    (tmp_path / "maxtext-0.2.5.dist-info").mkdir()
    (tmp_path / "maxtext-0.2.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: maxtext\nVersion: 0.2.5\n")
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.pathsep.join(sys.path)}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shape = asdict(TOY) | {"rows": 4, "seq_len": 32, "steps": 3, "warmup": 2}
    ended = subprocess.run(["bash", str(peer.FOLDER / "maxtext.sh"), json.dumps(shape)], env=environment, capture_output=True, text=True)
    assert peer.read_line(ended.stdout, ended.stderr, ended.returncode) == wanted, ended.stderr


def test_the_yardstick_computes_the_model():
    """Loss and gradients in bf16 near those of the independent decoder in fp32."""
    arch = replace(TOY, num_layers=1)
    shape = asdict(arch)
    theirs = jax.tree.map(lambda w: w * 4 if w.ndim > 1 else w, plain_jax.parameters(shape, jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, arch.vocab_size, (2, 17), dtype=np.int32)

    def as_ours(params):
        attention = {name: jnp.stack([w[name[0]].reshape(64, -1, 8) for w in params["layers"]]) for name in ("query", "key", "value")}
        attention["out"] = jnp.stack([w["o"].reshape(-1, 8, 64) for w in params["layers"]])
        stack = {n: jnp.stack([w[n] for w in params["layers"]]) for n in ("gate", "up", "down", "norm1", "norm2")}
        layers = {"attention": attention, "mlp": {n: stack[n] for n in ("gate", "up", "down")},
                  "attention_norm": {"weight": stack["norm1"]}, "mlp_norm": {"weight": stack["norm2"]}}
        head = {"norm": {"weight": params["norm"]}, "tokens": params["head"]}
        return {"embed": {"tokens": params["embed"]}, "layers": layers, "head": head}

    places = reference.places(None, (2, 16))
    mask = np.ones((2, 16), np.float32)

    def wanted(params):
        return reference.loss(as_ours(params), arch, tokens[:, :-1], tokens[:, 1:], mask, *places)

    with jax.numpy_dtype_promotion("standard"):
        got, grads = jax.jit(jax.value_and_grad(lambda p: plain_jax.loss_of(shape, p, tokens)))(theirs)
    want, right = jax.jit(jax.value_and_grad(wanted))(theirs)
    assert abs(got - want) < 5e-3 * want
    for (path, one), other in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(right), strict=True):
        assert np.linalg.norm(one - other) < 0.03 * np.linalg.norm(other), path
