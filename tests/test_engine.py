"""A module of the user's: the example of the docs on ZeRO layouts against plain JAX on one device, and what is refused.

The reference shares nothing with jaxmeg: `jax.value_and_grad` of the whole batch, and momentum written out.
"""

import functools
import importlib.util
import json
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmeg
from jaxmeg.cli import ConfigError, config_of
from jaxmeg.data.loader import read_ahead
from jaxmeg.data.source import open_rows
from jaxmeg.data.store import DataError
from jaxmeg.engine import BatchError, Engine, import_object, initialize, own_setup
from jaxmeg.models.own import OwnModel, OwnModuleError
from jaxmeg.own_step import make_own_eval_step, own_gradients
from jaxmeg.report import Progress
from jaxmeg.train import run

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "encoder.py"
LR, MOMENTUM, ROWS = 0.05, 0.9, 16
SGD = {"optim.name": "sgd", "optim.lr": LR, "optim.momentum": MOMENTUM, "optim.warmup": 0, "optim.schedule": "constant",
       "optim.weight_decay": 0.0, "optim.clip_norm": 0.0, "precision.matmul": "highest", "data.global_batch": ROWS}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("encoder_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(autouse=True)
def relaxed():
    """Strict promotion is for jaxmeg's own code; users write theirs as they like."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def weighted_loss(encoder, batch):
    """Several losses a row, of which a different number counts in each row."""
    z = jax.nn.log_softmax(encoder(batch["ids"]))
    return -z, (jnp.arange(3) <= batch["label"][:, None]).astype(jnp.float32)


def new_encoder() -> nnx.Module:
    return example.Encoder(nnx.Rngs(5))


def plain(loss, batches):
    """(losses, gradients and norm of the first batch, parameters after all batches), by hand on one device."""
    graph, params = nnx.split(new_encoder(), nnx.Param)

    def mean(params, batch):
        value = loss(nnx.merge(graph, params), batch)
        losses, weights = value if isinstance(value, tuple) else (value, jnp.ones_like(value))
        return jnp.sum(losses * weights) / jnp.sum(weights)

    with jax.default_matmul_precision("highest"):
        step = jax.jit(jax.value_and_grad(mean))
        losses, first, velocity = [], None, jax.tree.map(jnp.zeros_like, params)
        for batch in batches:
            value, grads = step(params, batch)
            losses.append(float(value))
            first = first or jax.device_get(grads)
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
            params = jax.tree.map(lambda p, v: p - LR * v, params, velocity)
    return losses, nnx.to_pure_dict(first), nnx.to_pure_dict(jax.device_get(params))


def assert_close(got, want, floor):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.linalg.norm(np.asarray(x) - y) / max(np.linalg.norm(y), floor)
        assert error <= 1e-4, f"{jax.tree_util.keystr(path)} is off by {error:.1e}"


LAYOUTS = [({"mesh.dp": 4}, 0, 4), ({"mesh.dp": 4}, 1, 2), ({"mesh.dp": 4}, 2, 2), ({"mesh.dp": 8}, 3, 1),
           ({"mesh.dp": 2, "mesh.rep": 2}, 3, 2)]


@pytest.fixture(scope="module", params=["mean of rows", "weighted"])
def reference(request):
    loss = example.loss if request.param == "mean of rows" else weighted_loss
    rng = np.random.default_rng(1)
    batches = [example.make_batch(rng, ROWS) for _ in range(3)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return loss, batches, plain(loss, batches)


@pytest.mark.parametrize(("mesh", "zero", "microbatch"), LAYOUTS)
def test_every_zero_stage_equals_one_device(reference, mesh, zero, microbatch):
    loss, batches, (losses, grads, params) = reference
    count = int(np.prod(list(mesh.values())))
    engine = initialize(new_encoder(), loss, {**SGD, **mesh, "layout.zero": zero, "pipeline.microbatch": microbatch}, jax.devices()[:count])
    norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads))))
    for n, batch in enumerate(batches):
        metrics = engine.step(batch)
        assert float(metrics.loss) == pytest.approx(losses[n], abs=1e-5)
        if n == 0:
            assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
            # a key bias has a true gradient of zero: the floor of the contract
            assert_close(optax.tree.get(engine.state.opt_state, "trace"), grads, 1e-3 * norm)
    assert_close(engine.state.params, params, 1e-3)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(engine.state.params))
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    assert held == whole if zero == 0 else held < 0.4 * whole if mesh["mesh.dp"] >= 4 else held < 0.6 * whole


def test_the_example_trains_as_it_stands():
    assert len(EXAMPLE.read_text().splitlines()) < 60
    config = {"mesh.dp": 4, "layout.zero": 2, "data.global_batch": 64, "pipeline.microbatch": 8, "optim.lr": 3e-3, "train.steps": 60}
    engine = jaxmeg.initialize(example.Encoder, example.loss, config, jax.devices()[:4])
    assert isinstance(engine, Engine)
    rng = np.random.default_rng(0)
    before, count = engine.evaluate(example.make_batch(rng))
    for _ in range(60):
        engine.step(example.make_batch(rng))
    after, _ = engine.evaluate(example.make_batch(rng))
    assert count == 64 and before > 0.9 and after < 0.2
    encoder = engine.module
    assert isinstance(encoder, example.Encoder)
    batch = example.make_batch(rng, 10)
    want = float(jnp.mean(example.loss(jax.device_get(encoder), batch)))
    loss, count = engine.evaluate(batch)  # ten rows in a batch of 64: the others do not count
    assert count == 10 and loss == pytest.approx(want, abs=1e-5)


class Counter(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(2, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)


class Half(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=rngs)


@pytest.mark.parametrize(("module", "config", "error", "message"), [
    (example.Encoder, {"mesh.tp": 2}, ConfigError, "mesh.tp=2 does not work with a module of your own, whose layers jaxmeg can't cut: use"),
    (example.Encoder, {"mesh.pp": 4}, ConfigError, "mesh.pp=4 does not work with a module of your own"),
    (example.Encoder, {"precision.compute": "bf16"}, ConfigError, "precision.compute=bf16 has no effect on a module of your own"),
    (example.Encoder, {"layout.remat": "full"}, ConfigError, "layout.remat=full has no effect on a module of your own"),
    (example.Encoder, {"model.num_layers": 3}, ConfigError, "model.num_layers=3 has no effect on a module of your own"),
    (example.Encoder, {"data.global_batch": 30}, ConfigError, "mesh.dp=8 does not divide data.global_batch=30"),
    (example.Encoder, {"mesh.dp": 3}, ConfigError, "mesh dp=3 does not fit 8 devices"),
    (example.Encoder, {"mesh.dq": 3}, ConfigError, "unknown key mesh.dq"),
    (example.Encoder, {"checkpoint.every": 5}, ConfigError, "checkpoint.every=5 has no effect on jaxmeg.initialize, around which the loop"),
    (example.Encoder, {"data.prefetch": 2}, ConfigError, "data.prefetch=2 has no effect on jaxmeg.initialize"),
    (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {"train.seed": 1}, ConfigError, "train.seed=1 has no effect on jaxmeg.initialize"),
    (nnx.Linear, {}, OwnModuleError, "Linear can't be made from rngs alone (missing a required argument: 'in_features'): give a function"),
    (lambda rngs: Path(), {}, OwnModuleError, "<lambda> makes a PosixPath: give a function of rngs that returns an nnx.Module"),
    (lambda: None, {}, OwnModuleError, "<lambda> can't be made from rngs alone"),
    ("Net", {}, OwnModuleError, "the module is a str: give an nnx.Module, or a function of rngs that makes one"),
    (Counter, {}, OwnModuleError, "Counter holds 2 values besides parameters, the first is norm.mean (BatchStat): only nnx.Param is"),
    (Half, {}, OwnModuleError, "Half: linear.bias is bfloat16, and masters are float32: use param_dtype=float32"),
])
def test_what_is_refused_by_name(module, config, error, message):
    with pytest.raises(error) as caught:
        initialize(module, example.loss, config)
    assert message in str(caught.value)


class ByName(nnx.Module):
    """Takes rngs by name only, and something else first."""

    def __init__(self, width: int = 3, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, 2, rngs=rngs)


def by_position(keys: nnx.Rngs, /) -> nnx.Module:
    return ByName(rngs=keys)


@pytest.mark.parametrize("make", [
    ByName, functools.partial(ByName, 3), functools.partial(ByName, width=3), by_position, lambda rngs: ByName(rngs=rngs),
    lambda keys: ByName(rngs=keys), lambda **given: ByName(**given), lambda *given: ByName(rngs=given[0]),
    lambda width=3, rngs=None: ByName(width, rngs=rngs),
], ids=["class", "partial", "partial by name", "by position", "by name", "another name", "**", "*", "second"])  # fmt: skip
def test_rngs_are_given_by_name_or_by_position(make):
    model = OwnModel(make)
    want = nnx.state(ByName(rngs=nnx.Rngs(7)), nnx.Param)["linear"]["kernel"][...]
    np.testing.assert_array_equal(model.init(7, jnp.zeros(1))["linear"]["kernel"], want)


@pytest.mark.parametrize(("value", "message"), [
    (None, r"the loss returned a NoneType: return an array of losses, or \(losses, weights\)"),
    ({"loss": 1.0}, "the loss returned a dict"),
    (0.5, "the loss returned a float"),
    ([jnp.ones(8)], "the loss returned a list"),
    ((jnp.ones(8), None), r"the loss returned \(\w+, NoneType\)"),
    ((jnp.ones(8),) * 3, r"the loss returned \(\w+, \w+, \w+\)"),
    (jnp.ones(8, jnp.int32), "the loss returned losses of dtype int32, which have no gradient: return floating-point numbers"),
    ((jnp.ones(8), jnp.ones(4)), r"losses of shape \(8,\) and weights of shape \(4,\) for 8 rows"),
    (jnp.ones(4), r"losses of shape \(4,\) for 8 rows: return one loss a row"),
])  # fmt: skip
def test_a_loss_of_the_wrong_type_is_named(value, message):
    setup = own_setup(ByName, config_of({"data.global_batch": 8}), jax.devices()[:1])
    rows = ({"x": jnp.zeros((1, 8, 3))}, jnp.ones((1, 8), bool))
    with pytest.raises(OwnModuleError, match=message):
        jax.eval_shape(own_gradients(setup, lambda *_: value), setup.model.params, rows, jnp.zeros(2, jnp.uint32), jnp.float32(1))
    with pytest.raises(OwnModuleError, match=message):
        jax.eval_shape(make_own_eval_step(setup, lambda *_: value), setup.model.params, rows)


def test_batches_and_losses_of_the_wrong_shape():
    config, devices = {"data.global_batch": 8}, jax.devices()[:1]
    engine = initialize(example.Encoder, example.loss, config, devices)
    with pytest.raises(BatchError, match=r"batch leaf ids has 6 rows, and data.global_batch=8: give each step 8 rows"):
        engine.step(example.make_batch(np.random.default_rng(0), 6))
    mean = initialize(example.Encoder, lambda m, b: jnp.mean(example.loss(m, b)), config, devices)
    with pytest.raises(OwnModuleError, match=r"losses of shape \(\) for 8 rows: return one loss a row"):
        mean.step(example.make_batch(np.random.default_rng(0), 8))


class Sequences:
    """Rows by number, as a user would write them."""

    def __init__(self, count: int):
        batch = example.make_batch(np.random.default_rng(3), count)
        self.rows = [{name: x[i] for name, x in batch.items()} for i in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


SEQUENCES = Sequences(90)


@pytest.mark.parametrize("by_path", [False, True], ids=["objects", "import paths"])
def test_run_takes_module_loss_and_rows(tmp_path, by_path, monkeypatch):
    """Nine rows are kept for validation: each is counted once, whatever the batch."""
    paths = {"model.module": "own_task:Encoder", "model.loss": "own_task:loss", "data.source": "own_task:ROWS"} if by_path else {}
    objects = {} if by_path else {"module": example.Encoder, "loss": example.loss, "data": SEQUENCES}
    if by_path:
        (tmp_path / "own_task.py").write_text(
            "from test_engine import SEQUENCES as ROWS, example\nEncoder, loss = example.Encoder, example.loss\n")
        monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of({"mesh.dp": 4, "layout.zero": 2, "data.global_batch": 16, "data.validation_fraction": 0.1, "train.steps": 12,
                        "train.eval_every": 6, "train.out": str(tmp_path / "run"), "optim.warmup": 2, "record.tensorboard": False, **paths})
    result = run(config, jax.devices()[:4], **objects)
    assert result is not None and result.validation is not None
    assert len(result.losses) == 12 and result.losses[-1] < result.losses[0] and result.validation[1] == 9
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "validation_loss" in record] == [6, 12]


BROKEN = {
    "syntax": ("x = 1\ndef f(:\n", r"SyntaxError at \S*own_syntax.py, line 2: .*\): put that right"),
    "raises": ("\n\nraise RuntimeError('no\\n  luck')", r"RuntimeError at \S*own_raises.py, line 3: no luck\): put that right"),
    "needs": ("import numpy\nimport nowhere_at_all", r"ModuleNotFoundError at \S*own_needs.py, line 2: No module named 'nowhere_at_all'\)"),
    "library": ("import numpy\n\nx = numpy.zeros(2).reshape(\n    3)\n", r"ValueError at \S*own_library.py, line 3: cannot reshape .*\)"),
    "leaves": ("import sys\nsys.exit('usage')", r"SystemExit at \S*own_leaves.py, line 2: usage\)"),
    "nothing": ("x = 1", r"module 'own_nothing' has no attribute 'Net'\): give package.module:name"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_imported_is_one_line_with_its_place(name, tmp_path, monkeypatch):
    text, message = BROKEN[name]
    (tmp_path / f"own_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^model.module=own_{name}:Net can't be imported \({message}") as caught:
        import_object(f"own_{name}:Net", "model.module")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["os", "os:", ":x", "", "os:path.nothing", ".:x"])
def test_what_is_no_import_path_is_one_line(path):
    with pytest.raises(ConfigError, match=rf"^data.source={path} can't be imported \(.+\): give package.module:name$"):
        import_object(path, "data.source")


# ---------------------------------------------------------------- rows
def rows_like(*changes: dict[str, Any] | object) -> list[Any]:
    """Rows of two arrays, and then some that differ."""
    good = {"x": np.zeros((2, 3), np.float32), "label": 1}
    return [good] * 4 + [good | change if isinstance(change, dict) else change for change in changes]


@pytest.mark.parametrize(("source", "message"), [
    (iter([]), "the data source is a list_iterator, which has no __len__ and no __getitem__: give an object with len() and [i] -> a dict"),
    ({1, 2}, "the data source is a set, which has no __getitem__: give"),
    (Path, "the data source is the class Path, which has no __len__ and no __getitem__: give an object"),
    ({"x": np.zeros((9, 2))}, "row 0 of the data source can't be read (KeyError: 0), and len() is 1: give a row for every [i] from 0 to 0"),
    ([{}] * 9, "row 0 of the data source is an empty dict: give a dict of arrays"),
    ([np.zeros(2)] * 9, "row 0 of the data source is a ndarray: give a dict of arrays"),
    ([{"x": "text"}] * 9, "row 0 of the data source: x is a str of dtype <U4: give an array of numbers"),
    ([{"x": {"y": 1}}] * 9, "row 0 of the data source: x is a dict of dtype object"),
    ([{"x": [[1], [2, 3]]}] * 9, "row 0 of the data source: x is no array ("),
    (rows_like(5), "row 4 of the data source is a int: give a dict of arrays"),
    (rows_like({"more": 1}), "row 4 of the data source has x, label, more, and row 0 has x, label: give all rows the same names"),
    (rows_like({"x": np.zeros((3, 2), np.float32)}), "row 4 of the data source: x has shape (3, 2), and in row 0 (2, 3): give all rows"),
    (rows_like({"x": np.zeros((2, 3))}), "row 4 of the data source: x has dtype float64, and in row 0 float32: give all rows one dtype"),
    (rows_like({"label": 1.5}), "row 4 of the data source: label has dtype float64, and in row 0 int64"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_named(source, message):
    with pytest.raises(DataError) as caught:
        stream = open_rows(source, 0, 0.0)
        list(read_ahead(lambda n: stream.training(np.arange(5 * n, 5 * n + 5)), 0, 1, 1))  # as a run reads it, in a thread
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_share_of_a_few_rows_that_is_no_row_is_refused():
    with pytest.raises(DataError, match=r"^data.validation_fraction=0.05 of the 4 rows of the data source is no row: use a larger"):
        open_rows(rows_like(), 0, 0.05)
    assert open_rows(rows_like(), 0, 0.25).num_validation == 1


def test_every_epoch_is_an_order_of_its_own_and_is_drawn_once():
    stream = open_rows([{"n": n} for n in range(50)], 3, 0.2)
    epochs = [stream.training(np.arange(40 * e, 40 * e + 40))["n"].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert stream.training(np.arange(30, 50))["n"].tolist() == epochs[0][30:] + epochs[1][:10]
    assert stream.validation(0, 99)["n"].tolist() == list(range(40, 50)) and stream.validation(8, 8)["n"].tolist() == [48, 49]
    with unittest.mock.patch.object(np.random, "default_rng", wraps=np.random.default_rng) as draws:
        for first in range(4000, 4080, 4):  # two epochs in batches of four
            stream.training(np.arange(first, first + 4))
    assert draws.call_count == 2


def test_the_weights_of_a_validation_are_not_called_rows(capsys):
    """Three rows with losses that weigh 0.5, 1 and 2."""
    setup = own_setup(ByName, config_of({"data.global_batch": 8}), jax.devices()[:1])
    Progress(setup).validation(7, 0.25, 3.5)
    assert "step     7/180  validation loss 0.2500 over weights of 3.5 in all" in capsys.readouterr().out


def test_a_module_without_rows_or_loss_is_refused(tmp_path):
    config = config_of({"train.out": str(tmp_path / "run"), "data.global_batch": 8})
    with pytest.raises(ConfigError, match=r"model.loss is missing.*\n.*data.source is missing"):
        run(config, module=example.Encoder)
    with pytest.raises(ConfigError, match=r"model.module=nowhere:Net can't be imported \(No module named 'nowhere'\)"):
        run(config_of({"model.module": "nowhere:Net"}))
