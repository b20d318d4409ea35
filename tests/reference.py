"""An independent decoder in plain JAX: one function, one device, no modules, no sharding, no own derivatives.

It shares no code with jaxmeg but the shape of the parameter tree in canonical order. Used as what every layout must equal.
"""

import jax
import jax.numpy as jnp
import numpy as np

HIGHEST = jax.lax.Precision.HIGHEST


def _norm(w, x, arch, kind):
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + arch.norm_eps) * w["weight"].reshape((1,) * (x.ndim - 1) + (-1,)) + w[
            "bias"].reshape((1,) * (x.ndim - 1) + (-1,))
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + arch.norm_eps) * w["weight"].reshape((1,) * (x.ndim - 1) + (-1,))


def _rope(x, theta, positions):
    """Rotate pairs (i, i + K/2) as complex numbers."""
    T, K = x.shape[1], x.shape[-1]
    angle = np.arange(T)[:, None] * theta ** (-np.arange(K // 2) / (K // 2))[None]
    z = jax.lax.complex(x[..., : K // 2], x[..., K // 2 :]) * jnp.asarray(np.exp(1j * angle), jnp.complex64)[positions][:, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def _bias(w, name, ndim):
    if w.get(name) is None:
        return jnp.zeros((1,) * ndim)
    return w[name].reshape((1,) * (ndim - w[name].ndim) + w[name].shape)


def _attention(w, x, arch, positions, seen):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[n], precision=HIGHEST) + _bias(w, n + "_bias", 4) for n in ("query", "key", "value"))
    if arch.qk_norm:
        q, k = _norm(w["query_norm"], q, arch, "rms"), _norm(w["key_norm"], k, arch, "rms")
    if arch.positions == "rope":
        q, k = _rope(q, arch.rope_theta, positions), _rope(k, arch.rope_theta, positions)
    group = arch.num_heads // arch.num_kv_heads
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision=HIGHEST) / np.float32(np.sqrt(arch.head_dim))
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    a = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), v, precision=HIGHEST)
    return jnp.einsum("bthk,hkd->btd", a, w["out"], precision=HIGHEST) + _bias(w, "out_bias", 3)


def _mlp(w, x, arch):
    up = jnp.dot(x, w["up"], precision=HIGHEST) + _bias(w, "up_bias", 3)
    if arch.activation == "swiglu":
        gate = jnp.dot(x, w["gate"], precision=HIGHEST) + _bias(w, "gate_bias", 3)
        h = gate / (1 + jnp.exp(-gate)) * up
    else:
        h = 0.5 * up * (1 + jnp.tanh(np.float32(np.sqrt(2 / np.pi)) * (up + np.float32(0.044715) * up**3)))
    return jnp.dot(h, w["down"], precision=HIGHEST) + _bias(w, "down_bias", 3)


def places(segments, shape, window=None):
    """(position of each token in its document [B, T], which tokens each may see [B, T, T]), by loops. Documents are runs of one number;
    of a window, a token sees itself and window - 1 before it."""
    positions, seen = np.zeros(shape, np.int32), np.zeros((*shape, shape[1]), bool)
    for b, t in np.ndindex(*shape):
        if t and (segments is None or segments[b, t] == segments[b, t - 1]):
            positions[b, t] = positions[b, t - 1] + 1
        seen[b, t, max(t - positions[b, t], 0 if window is None else t - window + 1) : t + 1] = True
    return positions, seen


def loss(params, arch, inputs, labels, mask, positions, seen):
    """Mean cross-entropy of the tokens in the mask, fp32. params: canonical; positions, seen: from `places`."""
    x = params["embed"]["tokens"][inputs]
    if arch.positions == "learned":
        x = x + params["embed"]["positions"][positions]
    for i in range(arch.num_layers):
        w = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        x = x + _attention(w["attention"], _norm(w["attention_norm"], x, arch, arch.norm), arch, positions, seen)
        x = x + _mlp(w["mlp"], _norm(w["mlp_norm"], x, arch, arch.norm), arch)
    table = params["embed"]["tokens"] if arch.tied else params["head"]["tokens"]
    logits = jnp.einsum("btd,vd->btv", _norm(params["head"]["norm"], x, arch, arch.norm), table, precision=HIGHEST)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(mask, nll, 0.0)) / mask.sum().astype(np.float32)


def train(params, arch, batches, lr, momentum):
    """SGD with momentum by hand: (loss and gradients of the first batch, gradient norm, parameters at the end)."""
    step = jax.jit(jax.value_and_grad(lambda p, b: loss(p, arch, *b)))
    velocity, first = jax.tree.map(np.zeros_like, params), None
    for inputs, labels, mask, segments in batches:
        value, grads = jax.device_get(step(params, (inputs, labels, mask, *places(segments, inputs.shape, arch.sliding_window))))
        first = first or (float(value), grads)
        velocity = jax.tree.map(lambda v, g: np.float32(momentum) * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - np.float32(lr) * v, params, velocity)
    norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(first[1]))))
    return *first, norm, params
