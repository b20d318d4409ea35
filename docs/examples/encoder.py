"""A BERT-like encoder that classifies sequences, on 4 data-parallel ranks with ZeRO 2, in a loop of one's own.

python docs/examples/encoder.py          # on a machine without GPUs: XLA_FLAGS=--xla_force_host_platform_device_count=4
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmeg


class Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.attention_norm(x), mask=mask[:, None, None, :])
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocab_size=64, width=32, num_layers=2, max_len=16, num_classes=3):
        self.tokens, self.positions = nnx.Embed(vocab_size, width, rngs=rngs), nnx.Embed(max_len, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask=ids > 0)
        return self.head(x[:, 0])


def loss(encoder, batch):
    """Cross-entropy of each row; jaxmeg takes the mean over the whole batch."""
    return -jnp.take_along_axis(jax.nn.log_softmax(encoder(batch["ids"])), batch["label"][:, None], axis=1)[:, 0]


def make_batch(rng: np.random.Generator, rows: int = 64):
    """Sequences of different lengths; the class is in the first token."""
    ids = rng.integers(1, 64, (rows, 16)) * (np.arange(16) < rng.integers(4, 17, (rows, 1)))
    return {"ids": ids.astype(np.int32), "label": (ids[:, 0] % 3).astype(np.int32)}


if __name__ == "__main__":
    config = {"mesh.dp": 4, "layout.zero": 2, "data.global_batch": 64, "pipeline.microbatch": 8, "optim.lr": 3e-3, "train.steps": 100}
    engine = jaxmeg.initialize(Encoder, loss, config)
    rng = np.random.default_rng(0)
    for step in range(100):
        metrics = engine.step(make_batch(rng))
        if step % 20 == 19:
            print(f"step {step + 1}: loss {float(metrics.loss):.4f}")
    loss, _ = engine.evaluate(make_batch(rng))
    print(f"validation loss {loss:.4f}")
