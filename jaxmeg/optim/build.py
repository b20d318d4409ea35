"""From `OptimConfig` to optax: the learning rate per update, the decay mask, the transform.

Clipping is not here: the step clips by the global gradient norm that it computes once for all layouts.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxmeg.config import OptimConfig
from jaxmeg.layout import Layout
from jaxmeg.optim.adafactor import scale_by_adafactor
from jaxmeg.optim.matrices import VECTOR
from jaxmeg.optim.muon import scale_by_muon


def learning_rate(config: OptimConfig, num_updates: int) -> optax.Schedule:
    """Learning rate as a function of the number of updates applied so far: from 0 over `warmup` updates to `lr`, then
    by `schedule` to `final_lr_ratio * lr` at `num_updates`."""
    peak, final = config.lr, config.lr * config.final_lr_ratio
    rest = max(num_updates - config.warmup, 1)
    after: optax.Schedule
    match config.schedule:
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_lr_ratio)
        case "linear":
            after = optax.linear_schedule(peak, final, rest)
        case "wsd":
            decay = max(round(config.wsd_decay * num_updates), 1)
            after = optax.linear_schedule(peak, final, decay, transition_begin=max(rest - decay, 0))
        case "constant":
            after = optax.constant_schedule(peak)
        case _:
            raise ValueError(f"optim.schedule={config.schedule}: use cosine, linear, wsd or constant")
    if config.warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, config.warmup), after], [config.warmup])


def decay_mask(dims: Any) -> Any:
    """True for the leaves that weight decay shrinks: matrices and tables. Norms and biases have one dim of the model's
    width, or heads x head_dim, and do not decay, whether layers are stacked or not."""
    def decays(path: Any, names: tuple[str, ...]) -> bool:
        own = [name for name in names if name != "layers"]
        return len(own) >= 2 and VECTOR not in names and not str(path[-1].key).endswith("bias")
    return jax.tree_util.tree_map_with_path(decays, dims, is_leaf=lambda x: isinstance(x, tuple))


def make_optimizer(config: OptimConfig, num_updates: int, layout: Layout, vocab_size: int | None = None) -> optax.GradientTransformation:
    """The optimizer by name: its rule, plus decay on the leaves of `decay_mask`, times the learning rate.

    The size of an update before the learning rate: AdamW's and Muon's entries have a root mean square of about 0.2 to 1,
    Lion's of 1, Adafactor's at most that of the parameter, SGD's is the momentum's.
    layout: where the parameters live. vocab_size: rows of the vocabulary that are no padding, if there is one.
    """
    dims = layout.map(lambda leaf: leaf.dims)
    return optax.chain(
        _rule(config, layout, dims, vocab_size),
        optax.add_decayed_weights(config.weight_decay, decay_mask(dims)),
        optax.scale_by_learning_rate(learning_rate(config, num_updates)))


def _rule(config: OptimConfig, layout: Layout, dims: Any, vocab_size: int | None) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    match config.name:
        case "adamw":
            return adam
        case "lion":
            return optax.scale_by_lion(config.beta1, config.beta2)
        case "adafactor":
            return scale_by_adafactor(dims, vocab_size, config.factored_dim)
        case "muon":
            return scale_by_muon(layout, config.momentum, config.newton_schulz_steps, adam)
        case "sgd":
            return optax.trace(config.momentum) if config.momentum else optax.identity()
        case _:
            raise ValueError(f"optim.name={config.name}: use adamw, lion, adafactor, muon or sgd")
