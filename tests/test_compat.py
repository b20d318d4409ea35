"""What `_compat` hides: each name does what the rest of jaxmeg relies on, on every supported jax."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmeg import _compat

pytestmark = pytest.mark.smoke


def test_varying_axes_are_those_a_value_is_sharded_over():
    mesh = _compat.make_mesh(np.array(jax.devices()[:4], dtype=object).reshape(2, 2), ("a", "b"))
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    seen = []

    def body(x):
        seen.extend([_compat.varying_axes(x), _compat.varying_axes(jax.lax.psum(x, "a")), _compat.varying_axes(jnp.zeros(()))])
        return x

    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a")))(jnp.arange(4.0))
    assert seen == [frozenset({"a"}), frozenset(), frozenset()]


def test_a_vjp_is_rebuilt_from_its_leaves():
    def run(w, x):
        _, vjp = jax.vjp(lambda w, x: jnp.sin(w) * x, w, x)
        leaves, tree = _compat.vjp_leaves(vjp)
        again = jax.tree.unflatten(tree, [leaf + 0 for leaf in leaves])
        assert any(leaf is x for leaf in leaves)  # found by identity: what the pipeline's ring leaves out
        return vjp(jnp.float32(2)), again(jnp.float32(2))
    direct, rebuilt = jax.jit(run)(jnp.float32(0.3), jnp.float32(1.7))
    assert direct == rebuilt
    np.testing.assert_allclose(direct, (2 * np.cos(0.3) * 1.7, 2 * np.sin(0.3)), rtol=1e-6)


def test_own_vjp_is_used():
    @_compat.own_vjp(1)
    def double(x, n):
        return n * x
    double.defvjp(lambda x, n: (n * x, None), lambda n, saved, dy: (10.0 * n * dy,))
    assert float(jax.grad(double)(1.0, 3.0)) == 30.0


def test_cudnn_names_and_arguments():
    from jax._src.cudnn import fused_attention_stablehlo as fused
    operands = ["query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"]
    saved = ["activation", "fwd_output", "grad_output"]
    said = ["scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"]
    for name, wanted in (("fwd", [*operands, *said, "is_training"]), ("bwd", [*operands, *saved, *said])):
        assert list(inspect.signature(getattr(fused, f"_dot_product_attention_{name}_abstract")).parameters) == wanted
        assert getattr(fused, f"_dot_product_attention_{name}_p").multiple_results


@pytest.mark.parametrize("per_row", [None, 3])
def test_cudnn_attention_has_the_shapes_that_are_said(per_row):
    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    q, kv, int32 = shape(2, 16, 8, 64), shape(2, 16, 4, 64), jnp.int32
    ragged = per_row and _compat.Ragged(shape(2, per_row, dtype=int32), *[shape(2, per_row + 1, dtype=int32)] * 2)
    out, lse = jax.eval_shape(lambda q, k, v, r: _compat.cudnn_attention(q, k, v, ragged=r, window=5), q, kv, kv, ragged)
    assert out == q and lse == shape(2 * (per_row or 1), 8, 16, dtype=jnp.float32)
    grads = jax.eval_shape(lambda *args: _compat.cudnn_attention_grad(*args[:-1], ragged=args[-1], window=5),
                           q, kv, kv, out, lse, out, ragged)
    assert grads == (q, kv, kv)
