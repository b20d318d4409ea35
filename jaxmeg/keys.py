"""Every dotted key of the config with its type, default and text, and the short forms of the command line.

One table, read from the dataclasses of `config`: the help page, the parser and the hints for unknown keys use it. Must
not know argument vectors or files.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from jaxmeg import config as config_module
from jaxmeg.config import Config
from jaxmeg.wording import any_of, shown

SHORT_FORMS: dict[str, str] = {
    "model": "model.preset",
    "zero": "layout.zero",
    "remat": "layout.remat",
    "schedule": "pipeline.schedule",
    "chunks": "pipeline.chunks",
    "microbatch": "pipeline.microbatch",
    "lr": "optim.lr",
    "precision": "precision.compute",
    "data": "data.train",
    "seq_len": "data.seq_len",
    "global_batch": "data.global_batch",
    "steps": "train.steps",
    "out": "train.out",
    "resume": "checkpoint.resume",
    "init_from": "checkpoint.init_from",
    "profile": "record.profile",
}
"""Short form -> key. `--mesh tp=4,pp=2` is the one form that stands for several keys."""

OTHER_NAMES: dict[str, str] = {
    "accumulate_steps": "pipeline.microbatch",
    "batch_size": "data.global_batch",
    "block_size": "data.seq_len",
    "context_length": "data.seq_len",
    "context_parallel_size": "mesh.cp",
    "d_ff": "model.mlp_dim",
    "d_model": "model.embed_dim",
    "data_parallel_size": "mesh.dp",
    "dtype": "precision.compute",
    "expert_parallel_size": "mesh.ep",
    "fsdp": "layout.zero",
    "grad_clip": "optim.clip_norm",
    "gradient_accumulation_steps": "pipeline.microbatch",
    "gradient_checkpointing": "layout.remat",
    "hidden_size": "model.embed_dim",
    "intermediate_size": "model.mlp_dim",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_norm",
    "max_steps": "train.steps",
    "micro_batch_size": "pipeline.microbatch",
    "n_head": "model.num_heads",
    "n_layer": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_kv_heads",
    "output_dir": "train.out",
    "pipeline_parallel_size": "mesh.pp",
    "sequence_length": "data.seq_len",
    "tensor_parallel_size": "mesh.tp",
    "text": "data.train",
    "tie_word_embeddings": "model.tied",
    "warmup_steps": "optim.warmup",
    "weight_decay_rate": "optim.weight_decay",
}
"""What other stacks call a key: used for hints only, never accepted."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One option."""

    name: str
    """Dotted name, "optim.lr"."""
    type: Any
    """float, or for example int | None."""
    default: object
    doc: str

    @property
    def is_flag(self) -> bool:
        """Whether `--name` may stand without a value."""
        return self.type is bool

    @property
    def type_name(self) -> str:
        """The type in words: "a whole number or null"."""
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null",
                 dict[str, float]: "names with numbers"}
        return any_of(words[kind] for kind in get_args(self.type) or (self.type,))


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal under the field in config.py."""
    docs: dict[tuple[str, str], str] = {}
    classes = [node for node in ast.parse(inspect.getsource(config_module)).body if isinstance(node, ast.ClassDef)]
    for owner in classes:
        for statement, below in pairwise(owner.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[owner.name, name] = " ".join(text.split())
    return docs


def _read_keys() -> tuple[dict[str, Key], dict[str, type]]:
    """All keys by dotted name, and the class of every section."""
    docs, default = _field_docs(), Config()
    keys: dict[str, Key] = {}
    sections: dict[str, type] = {}

    def add(owner: type, values: object, prefix: str) -> None:
        hints = get_type_hints(owner)
        for field in fields(owner):
            value = getattr(values, field.name)
            if is_dataclass(value):
                sections[field.name] = type(value)
                add(type(value), value, f"{field.name}.")
            else:
                name, doc = prefix + field.name, docs[owner.__name__, field.name]
                keys[name] = Key(name=name, type=hints[field.name], default=value, doc=doc)

    add(Config, default, "")
    return keys, sections


KEYS, SECTIONS = _read_keys()


def section_keys(section: str) -> list[str]:
    """Names of a section's keys, without the section."""
    return [name.split(".")[1] for name in KEYS if name.startswith(f"{section}.")]


def unknown_key(name: str) -> str:
    """The message for a key that does not exist: names the nearest keys, or what the section has."""
    name = shown(name)
    section, _, leaf = name.rpartition(".")
    known = OTHER_NAMES.get(leaf) or (SHORT_FORMS.get(leaf) if not section else None)
    near = [known] if known else _nearest_keys(name)
    if near:
        return f"unknown key {name}: did you mean {any_of(near)}?"
    if section in SECTIONS:
        return f"unknown key {name}: the keys of {section} are {', '.join(section_keys(section))}"
    return f"unknown key {name}: --help lists all keys; the sections are {', '.join(SECTIONS)}"


def is_section(name: str) -> str:
    """The message for a section that was given a value."""
    return f"{name} is a section, not a value: give one of its keys, for example {name}.{section_keys(name)[0]}"


def _nearest_keys(name: str, cutoff: float = 0.6, count: int = 3) -> Iterable[str]:
    """Existing keys close to a name, closest first: the last part is alike or, if there is no such section, the whole.

    Keys that are nearly as close as the closest are named too.
    """
    section, _, leaf = name.rpartition(".")

    def likeness(key: str) -> float:
        key_leaf = key.rpartition(".")[2]
        whole, last = SequenceMatcher(None, name, key).ratio(), SequenceMatcher(None, leaf, key_leaf).ratio()
        return last + 0.01 * whole if section in SECTIONS else max(whole, last) + 0.01 * min(whole, last)

    scored = sorted(((likeness(key), key) for key in KEYS), reverse=True)
    best = scored[0][0]
    return [key for score, key in scored[:count] if score >= cutoff and score >= best - 0.05]
