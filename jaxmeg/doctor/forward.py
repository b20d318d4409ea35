"""A small jaxmeg model, forward and backward on one device, against closed values.

With a head of zeros every token is as likely as every other, so the loss is ln V. And a gradient is right if the loss
changes along it as fast as it says: (loss(p + e g) - loss(p - e g)) / 2e = |g|^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmeg.config import Config, DataConfig, LayoutConfig, MeshConfig, ModelConfig
from jaxmeg.doctor.finding import Finding, Problem, conclude
from jaxmeg.setup import Setup, build
from jaxmeg.step import Rows, loss_and_gradients, place

MODEL = ModelConfig(preset="toy", num_layers=1, embed_dim=128, num_heads=2, num_kv_heads=1, head_dim=64)
CONFIG = Config(model=MODEL, mesh=MeshConfig(dp=1), layout=LayoutConfig(zero=0), data=DataConfig(seq_len=128, global_batch=2))
LOSS_ERROR = 1e-4  # of ln V, which is summed in fp32
SLOPE_ERROR = 0.1  # of |g|^2: bf16 rounds the two losses
CHANGE = 0.1  # of the loss between its two ends


def forward(device: Any) -> Finding:
    """Compile and run it on one device, in the format that a run would take there."""
    setup = build(CONFIG, [device])
    run = jax.jit(loss_and_gradients(setup))
    rows, key, scale = _rows(setup), jax.random.key_data(jax.random.key(0)), jnp.float32(1)
    params = _params(setup)
    zero_head = params | {"head": params["head"] | {"tokens": jnp.zeros_like(params["head"]["tokens"])}}
    even = float(run(zero_head, rows, key, scale)[0])
    _, grads, _ = run(params, rows, key, scale)
    square = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads))
    step = np.float32(CHANGE / 2 / square) if square else np.float32(0)
    ends = [float(run(jax.tree.map(lambda p, g, e=e: p + e * g, params, grads), rows, key, scale)[0]) for e in (step, -step)]
    slope = (ends[0] - ends[1]) / (2 * float(step)) if square else math.nan
    about = f"{setup.compute}, attention {setup.model.options.kernel}, device {device.id}"
    return judge(even, setup.resolved.arch.vocab_size, square, slope, about)


def judge(loss: float, vocab_size: int, square: float, slope: float, about: str) -> Finding:
    """loss: with a head of zeros; square: |g|^2; slope: of the loss along g."""
    fine = f"loss {loss:.5f} = ln {vocab_size}, gradient agrees with differences of the loss ({about})"
    return conclude("forward", fine, _problems(loss, vocab_size, square, slope), [f"slope {slope:.5g}, |g|^2 {square:.5g}"])


def _problems(loss: float, vocab_size: int, square: float, slope: float) -> Iterator[Problem]:
    fix = "the compiler, a library or the device computes wrongly: update the driver and jax, and try another device"
    right = math.log(vocab_size)
    if not abs(loss - right) <= LOSS_ERROR * right:
        yield Problem("FAIL", f"the loss of even odds is {loss:.5f}, not ln {vocab_size} = {right:.5f}", fix)
    if not (square > 0 and abs(slope - square) <= SLOPE_ERROR * square):
        yield Problem("FAIL", f"the loss changes by {slope:.5g} along a gradient that says {square:.5g}", fix)


def _rows(setup: Setup) -> Rows:
    config = setup.config.data
    ids = np.random.default_rng(0).integers(0, setup.resolved.arch.vocab_size, (config.global_batch, config.seq_len + 1), np.int32)
    inputs, labels, mask = ids[:, :-1], ids[:, 1:], np.ones((config.global_batch, config.seq_len), bool)
    return Rows(*(place(setup, host, setup.resolved.num_microbatches) for host in (inputs, labels, mask)))


def _params(setup: Setup) -> Any:
    """Small random numbers: compiling the initialisation would take longer than the check."""
    rng = np.random.default_rng(1)
    return setup.layout.map(lambda leaf, sharding: jax.device_put(0.1 * rng.standard_normal(leaf.shape, np.float32), sharding),
                            setup.layout.shardings)
