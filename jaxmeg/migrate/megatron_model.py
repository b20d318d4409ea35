"""The model that a whole Megatron-LM command builds: every field of ours, with Megatron's defaults where it is silent.

Megatron's defaults are GPT-2's: layer norm, learned positions, GELU, biases, tied embeddings, dropout of 0.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmeg.migrate.core import ABSENT, Migration, choice, differs, never, not_built, not_needed, number, whole
from jaxmeg.migrate.megatron_table import MODEL, SHAPE
from jaxmeg.migrate.shared import Found, find, lack, put, size

POSITIONS = {"learned_absolute": "learned", "rope": "rope"}
NORMS = {"layernorm": "layer", "rmsnorm": "rms"}
VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
BIASES = ("model.attn_bias", "model.out_bias", "model.mlp_bias")
ATTENTION_DROPOUT = "dropout of attention weights; train.dropout drops activations"


def put_model(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    """All of section model; nothing without a shape."""
    lack(out, find(given, "--attention-dropout"), not_built(ATTENTION_DROPOUT))
    if not is_whole:
        for name in MODEL:
            lack(out, find(given, name), differs(f"without {SHAPE[0]} the model is {out.get('model.preset')}", off=never))
        return
    missing = [name for name in SHAPE if name not in given]
    if missing:
        out.problems.append(f"{' and '.join(missing)} missing: Megatron needs {', '.join(SHAPE)}; give all three, or none for the model "
                            f"{out.get('model.preset')}")
        return
    if "--attention-dropout" not in given:
        out.lack("--attention-dropout", "0.1 (absent)", not_built(ATTENTION_DROPOUT, off=never))
    _put_sizes(given, out)
    _put_vocabulary(given, out)
    _put_positions(given, out)
    put(out, find(given, "--normalization", "LayerNorm"), "model.norm", choice(NORMS, "use LayerNorm or RMSNorm"))
    put(out, find(given, "--layernorm-epsilon") or find(given, "--norm-epsilon", 1e-5), "model.norm_eps", number)
    for name in ("--squared-relu", "--quick-geglu"):
        lack(out, find(given, name), not_built("this activation; model.activation is gelu"))
    _put_flag(given, out, "--swiglu", {"model.activation": "swiglu"}, {"model.activation": "gelu"}, "in its tanh form")
    _put_flag(given, out, "--disable-bias-linear", dict.fromkeys(BIASES, False), dict.fromkeys(BIASES, True))
    put(out, find(given, "--add-qkv-bias"), "model.attn_bias", lambda _: True)
    if out.get("model.norm") == "rms" or "--qk-layernorm" not in given:
        _put_flag(given, out, "--qk-layernorm", {"model.qk_norm": True}, {"model.qk_norm": False})
    else:
        out.lack("--qk-layernorm", True, not_built("a layer norm on queries and keys; with RMSNorm there is one"))
        out.put("--qk-layernorm", ABSENT, "model.qk_norm", False)
    _put_flag(given, out, "--untie-embeddings-and-output-weights", {"model.tied": False}, {"model.tied": True})


def _put_sizes(given: Mapping[str, Any], out: Migration) -> None:
    layers, width, heads = (size(out, given, name, 1) or 1 for name in SHAPE)
    for name, leaf, value in zip(SHAPE, ("num_layers", "embed_dim", "num_heads"), (layers, width, heads)):
        out.put(name, given[name], f"model.{leaf}", value)
    gated = int(4 * width * 2 / 3 / 64) * 64
    put(out, find(given, "--ffn-hidden-size", gated if "--swiglu" in given else 4 * width), "model.mlp_dim", whole)
    if "--kv-channels" not in given and width % heads:
        out.problems.append(f"--num-attention-heads={heads} does not divide --hidden-size={width}: give --kv-channels")
    put(out, find(given, "--kv-channels", width // heads), "model.head_dim", whole)
    if "--group-query-attention" in given:
        put(out, find(given, "--num-query-groups", 1), "model.num_kv_heads", whole)
        lack(out, find(given, "--group-query-attention"), not_needed("model.num_kv_heads says it"))
    else:
        out.put("--group-query-attention", ABSENT, "model.num_kv_heads", heads, "a kv head for every query head")
        lack(out, find(given, "--num-query-groups"), not_needed("Megatron reads it with --group-query-attention"))


def _put_flag(given: Mapping[str, Any], out: Migration, name: str, on: Mapping[str, Any], off: Mapping[str, Any], note: str = "") -> None:
    """Our values with and without a flag."""
    is_on = name in given
    for key, value in (on if is_on else off).items():
        out.put(name, True if is_on else ABSENT, key, value, "" if is_on else note)


def _put_positions(given: Mapping[str, Any], out: Migration) -> None:
    kind = find(given, "--position-embedding-type") or Found("--position-embedding-type", "learned_absolute", given=False)
    rotary = find(given, "--use-rotary-position-embeddings")
    if rotary is not None:
        kind = Found(rotary.key, "rope")
    positions = POSITIONS.get(str(kind.value))
    if positions is None:
        out.lack(kind.key, kind.value, not_built("these positions; model.positions is rope", off=never))
    out.put(kind.key, kind.shown, "model.positions", positions or "rope")
    put(out, find(given, "--max-position-embeddings"), "model.max_seq_len", whole)
    base = find(given, "--rotary-base", 10_000)
    if positions == "learned":
        lack(out, base, not_needed("positions are learned"))
    else:
        put(out, base, "model.rope_theta", number)


def _put_vocabulary(given: Mapping[str, Any], out: Migration) -> None:
    """model.vocab_size: as given, as the tokenizer's file says, or as the kind of tokenizer has it."""
    kind = find(given, "--tokenizer-type") or Found("--tokenizer-type", "GPT2BPETokenizer", given=False)
    model = find(given, "--tokenizer-model")
    file = tokenizer_file(str(model.value)) if model else None
    if "--vocab-size" in given:
        put(out, find(given, "--vocab-size"), "model.vocab_size", whole)
    elif model is not None and file is not None:
        put(out, model, "model.vocab_size", lambda _: count_ids(file), f"ids in {file}")
    elif kind.value in VOCABULARIES:
        out.put(kind.key, kind.shown, "model.vocab_size", VOCABULARIES[kind.value], f"of {kind.value}")
    else:
        out.lack("--vocab-size", "(absent)", differs(
            f"the vocabulary is not known: model.vocab_size is that of {out.get('model.preset')}; --set model.vocab_size=N", off=never))


def tokenizer_file(name: str) -> Path | None:
    """The tokenizer.json that a name stands for, itself or in a folder, if it is on this machine."""
    return next((file for file in (Path(name), Path(name) / "tokenizer.json") if file.suffix == ".json" and file.is_file()), None)


def count_ids(file: Path) -> int:
    """Token ids of a tokenizer.json: the largest + 1. Raises ValueError for another kind of file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([*ids, *(token["id"] for token in content.get("added_tokens", []))]) + 1
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no tokenizer.json") from error
