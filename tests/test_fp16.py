"""fp16 with dynamic loss scaling, and what a step does with a gradient that is not finite, on one device and on layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import Row, batches, config_of

from jaxmeg.precision import LossScale, next_loss_scale
from jaxmeg.setup import build
from jaxmeg.state import canonical, init_state
from jaxmeg.step import make_train_step, place_rows

GROWTH = 3
HUGE = 2.0**24
LAYOUTS = ["", "pp=2,dp=2", "pp=2,dp=2,tp=2"]


@pytest.fixture(scope="module")
def runs():
    """(setup, compiled step) of each layout."""
    made = {}
    for mesh in LAYOUTS:
        config = config_of(Row(mesh, zero=2 if mesh else 1, compute="fp16", optimizer="adamw", microbatch=2))
        config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, loss_scale_growth_interval=GROWTH))
        count = int(np.prod([int(part[-1]) for part in mesh.split(",") if part] or [1]))
        setup = build(config, jax.devices()[:count])
        made[mesh] = setup, make_train_step(setup)
    return made


def _rows(setup, n):
    inputs, labels, mask, _ = batches(256, setup.config.data.global_batch)[n % 3]
    return place_rows(setup, inputs, labels, mask, setup.resolved.num_microbatches)


def _bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _with_scale(state, scale, good_steps=0):
    """The state with another loss scale, placed like the old one."""
    place = state.loss_scale.scale.sharding
    return state._replace(loss_scale=LossScale(jax.device_put(jnp.float32(scale), place), jax.device_put(jnp.int32(good_steps), place)))


def _history(setup, step):
    """Eight steps; before step 4 the scale is set so high that no fp16 cotangent survives, after it back to its start."""
    state, history = init_state(setup, 0), []
    start = float(state.loss_scale.scale)
    for n in range(8):
        if n == 4:
            state = _with_scale(state, HUGE)
            before = _bits((state.params, state.opt_state, state.updates))
        state, metrics = step(state, _rows(setup, n))
        history.append((bool(metrics.finite), float(metrics.loss_scale), float(state.loss_scale.scale)))
        if n == 4:
            assert _bits((state.params, state.opt_state, state.updates)) == before
            assert int(state.step) == 5 and int(state.updates) == 4 and int(state.skipped) == 1
            assert np.isfinite(float(metrics.loss)) and not np.isfinite(float(metrics.grad_norm))
            assert not np.asarray(metrics.leaf_finite).all()
            state = _with_scale(state, start)
    assert int(state.updates) == 7 and int(state.skipped) == 0
    return start, history, canonical(setup, state.params)


@pytest.fixture(scope="module")
def histories(runs):
    return {mesh: _history(*runs[mesh]) for mesh in LAYOUTS}


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_an_overflow_halves_the_scale_and_good_steps_double_it(histories, mesh):
    """And garbage in the slots of bubbles never trips it: every other step is applied."""
    start, history, _ = histories[mesh]
    finite, used, left = zip(*history)
    assert finite == (True, True, True, True, False, True, True, True)
    assert used == (start, start, start, 2 * start, HUGE, start, start, start)
    assert left == (start, start, 2 * start, 2 * start, HUGE / 2, start, start, 2 * start)


@pytest.mark.parametrize("mesh", LAYOUTS[1:])
def test_layouts_agree_after_an_overflow(histories, mesh):
    """The same skips and scales as on one device, and parameters that differ by far less than the updates moved them."""
    _, want_history, want = histories[""]
    _, history, params = histories[mesh]
    assert history == want_history
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(want)):
        assert np.sqrt(np.mean((got - expected) ** 2)) < 0.1 * 7e-3  # 7 updates of AdamW at lr 1e-3


def test_the_scale_never_leaves_its_bounds():
    low = next_loss_scale(LossScale(jnp.float32(1.0), jnp.int32(0)), jnp.bool_(False), "fp16", 1)
    high = next_loss_scale(LossScale(jnp.float32(2.0**24), jnp.int32(0)), jnp.bool_(True), "fp16", 1)
    same = next_loss_scale(LossScale(jnp.float32(1.0), jnp.int32(0)), jnp.bool_(False), "bf16", 1)
    assert (float(low.scale), float(high.scale), float(same.scale)) == (1.0, 2.0**24, 1.0)


def test_a_gradient_that_is_not_finite_changes_nothing_in_fp32():
    """A NaN weight in one leaf: the step names the leaves, skips, and counts."""
    setup = build(config_of(Row("pp=2,tp=2", optimizer="adamw")), jax.devices()[:4])
    state = init_state(setup, 0)
    norm = state.params["head"]["norm"]["weight"]
    state.params["head"]["norm"]["weight"] = jax.device_put(np.full(norm.shape, np.nan, np.float32), norm.sharding)
    before = _bits((state.params, state.opt_state))
    for count in (1, 2):
        state, metrics = make_train_step(setup)(state, _rows(setup, 0))
        assert _bits((state.params, state.opt_state)) == before
        assert int(state.skipped) == count and int(state.updates) == 0 and not bool(metrics.finite)
