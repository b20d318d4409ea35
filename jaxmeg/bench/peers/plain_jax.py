"""A Llama step in plain JAX on one GPU, without a framework: what XLA gives a careful user, and so a yardstick for our own step.

    python plain_jax.py '{"num_layers": 8, "embed_dim": 4096, ..., "rows": 4, "seq_len": 8192, "steps": 10, "warmup": 3}'

Layers written out, cuDNN attention, own derivatives of norm and gated MLP, the loss in pieces with its gradient in the forward pass,
bf16 arithmetic on fp32 weights, AdamW with fp32 state. Prints one JSON line for `jaxmeg.bench.peer`.
"""
# pyright: reportAttributeAccessIssue=false

import json
import os
import sys
import time
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

PIECE = 4096  # tokens of one piece of the loss


def parameters(s: dict, key: jax.Array) -> dict:
    d, f, v, k = s["embed_dim"], s["mlp_dim"], s["vocab_size"], s["head_dim"]
    shapes = {"q": (d, s["num_heads"] * k), "k": (d, s["num_kv_heads"] * k), "v": (d, s["num_kv_heads"] * k), "o": (s["num_heads"] * k, d),
              "gate": (d, f), "up": (d, f), "down": (f, d)}

    def normal(i: int, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape)

    def layer(i: int) -> dict:
        ones = {"norm1": jnp.ones(d), "norm2": jnp.ones(d)}
        return ones | {name: normal(100 * (i + 1) + j, shape) for j, (name, shape) in enumerate(shapes.items())}

    rest = {} if s["tied"] else {"head": normal(1, (v, d))}
    return {"embed": normal(0, (v, d)), "norm": jnp.ones(d), "layers": [layer(i) for i in range(s["num_layers"])]} | rest


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm(x: jax.Array, w: jax.Array, eps: float) -> jax.Array:
    return _norm(x, w, eps)[0]


def _norm(x, w, eps):
    x32 = x.astype(jnp.float32)
    r = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (x32 * r * w[None, None]).astype(x.dtype), (x, w, r)


def _norm_back(eps, saved, dy):
    x, w, r = saved
    n, dy = x.astype(jnp.float32) * r, dy.astype(jnp.float32)
    dn = dy * w[None, None]
    return (r * (dn - n * jnp.mean(dn * n, -1, keepdims=True))).astype(x.dtype), jnp.sum(dy * n, (0, 1))


norm.defvjp(_norm, _norm_back)


@jax.custom_vjp
def mlp(h: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return _mlp(h, gate, up, down)[0]


def _mlp(h, gate, up, down):
    g, u = h @ gate, h @ up
    return (jax.nn.silu(g) * u) @ down, (h, g, u, gate, up, down)


def _mlp_back(saved, dy):
    h, g, u, gate, up, down = saved
    da = jnp.einsum("bsd,fd->bsf", dy, down).astype(jnp.float32)
    g32, u32 = g.astype(jnp.float32), u.astype(jnp.float32)
    sig = jax.nn.sigmoid(g32)
    a, du, dg = ((x).astype(h.dtype) for x in (g32 * sig * u32, da * g32 * sig, da * u32 * sig * (1 + g32 * (1 - sig))))
    dh = jnp.einsum("bsf,df->bsd", dg, gate) + jnp.einsum("bsf,df->bsd", du, up)
    return dh, *(jnp.einsum("bsx,bsy->xy", x, y) for x, y in ((h, dg), (h, du), (a, dy)))


mlp.defvjp(_mlp, _mlp_back)


@jax.custom_vjp
def cross_entropy(x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
    return _cross_entropy(x, table, labels)[0]


def _cross_entropy(x, table, labels):
    """Sum over tokens [N]; logits exist a piece at a time."""
    def piece(dtable, part):
        x, labels = part
        z = jnp.dot(x, table.T, preferred_element_type=jnp.float32)
        lse = jax.nn.logsumexp(z, -1, keepdims=True)
        hit = lax.broadcasted_iota(jnp.int32, z.shape, 1) == labels[:, None]
        loss = jnp.sum(lse) - jnp.sum(jnp.where(hit, z, jnp.zeros_like(z)))
        dz = (jnp.exp(z - lse) - hit.astype(jnp.float32)).astype(x.dtype)
        return dtable + jnp.dot(dz.T, x, preferred_element_type=jnp.float32), (loss, dz @ table)

    count = next(n for n in range(-(-len(x) // PIECE), len(x) + 1) if len(x) % n == 0)
    parts = x.reshape(count, -1, x.shape[-1]), labels.reshape(count, -1)
    dtable, (loss, dx) = lax.scan(piece, jnp.zeros(table.shape, jnp.float32), parts)
    return jnp.sum(loss), (dx.reshape(x.shape), dtable.astype(table.dtype))


cross_entropy.defvjp(_cross_entropy, lambda saved, dy: (saved[0] * dy.astype(saved[0].dtype), saved[1] * dy.astype(saved[1].dtype), None))


def rotate(x, theta):
    half = x.shape[-1] // 2
    phase = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] / theta ** (jnp.arange(half, dtype=jnp.float32) / half)[None]
    cos, sin = jnp.cos(phase)[None, :, None], jnp.sin(phase)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def loss_of(s: dict, params: dict, tokens: jax.Array) -> jax.Array:
    """Mean loss of tokens [B, T + 1]."""
    dtype = jnp.bfloat16
    params = jax.tree.map(lambda w: w if w.ndim == 1 else w.astype(dtype), params)
    x, eps = params["embed"][tokens[:, :-1]], s["norm_eps"]
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    for w in params["layers"]:
        h = norm(x, w["norm1"], eps)
        q, k, v = (jnp.reshape(h @ w[n], (*h.shape[:2], -1, s["head_dim"])) for n in "qkv")
        a = jax.nn.dot_product_attention(rotate(q, s["rope_theta"]), rotate(k, s["rope_theta"]), v, is_causal=True, implementation=kernel)
        x = x + a.reshape(*x.shape[:2], -1) @ w["o"]
        x = x + mlp(norm(x, w["norm2"], eps), w["gate"], w["up"], w["down"])
    x = norm(x, params["norm"], eps)
    labels = tokens[:, 1:].reshape(-1)
    return cross_entropy(x.reshape(-1, x.shape[-1]), params["embed" if s["tied"] else "head"], labels) / labels.size


def main(s: dict) -> dict:
    params = jax.jit(partial(parameters, s))(jax.random.key(0))
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
    state = jax.jit(rule.init)(params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, s["vocab_size"], (s["rows"], s["seq_len"] + 1), dtype=np.int32))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(lambda p: loss_of(s, p, tokens))(params)
        changes, state = rule.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss

    started = time.perf_counter()
    compiled = step.lower(params, state, tokens).compile()
    compile_seconds, seconds, losses = time.perf_counter() - started, [], []
    for _ in range(s["warmup"] + s["steps"]):
        started = time.perf_counter()
        params, state, loss = compiled(params, state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"seconds": seconds[s["warmup"]:], "losses": losses, "peak_bytes": peak, "compile_s": compile_seconds, "notes": [],
            "versions": {"jax": jax.__version__, "optax": optax.__version__}}


if __name__ == "__main__":
    try:
        found = main(json.loads(sys.argv[1]))
    except Exception as error:  # the bench writes it down
        found = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
    print(json.dumps(found), flush=True)
