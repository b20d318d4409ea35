"""What may change when a run goes on: the saved config beside the new one. No jax.

The layout (mesh, ZeRO, schedule, chunks, microbatch, processes) and the reports may always change. What would change
the learning rate, the data, the number formats or the updates needs `checkpoint.allow_changes`, and the message says
what it does. The model (`Arch`) cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from math import isclose
from typing import Any

from jaxmeg.arch import Arch
from jaxmeg.checkpoint.manifest import Manifest
from jaxmeg.config import Config, OptimConfig, TrainConfig

LearningRate = Callable[[OptimConfig, int], Callable[[int], Any]]
"""(optimizer, train.steps) -> learning rate after so many updates."""

_RATE_KEYS = ("train.steps", "optim.lr", "optim.warmup", "optim.schedule", "optim.final_lr_ratio", "optim.wsd_decay")
# Sections and keys that may change. A key that is in neither table is guarded, so a new one is until it is put here.
_FREE = (
    *("mesh", "layout", "pipeline", "checkpoint", "record", "guard", "distributed", "emulate", "show_layout"),
    *("train.out", "train.stop_after", "train.eval_every", "train.eval_rows", "train.log_every"),
    *("train.sample_tokens", "train.sample_prompt"),
    *("data.prefetch", "optim.max_skipped_updates", "model.preset", *(f"model.{field.name}" for field in fields(Arch))),
)
# What a guarded key changes, by its longest prefix here.
_CHANGES = {
    "": "the run",
    "data": "the rows that are read",
    "model.module": "the model",
    "model.loss": "the loss",
    "optim": "the updates",
    "precision": "the number formats",
    "train.dropout": "the loss",
    "train.seed": "the order of the rows and the dropout masks",
}
_SAMPLES = 64  # learning rates that are compared


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key whose value differs."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {_show(self.old)} -> {_show(self.new)}"


def config_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Keys whose values differ between two configs as nested dicts; a key the saved one lacks had its default."""
    old = _dotted(asdict(Config())) | _dotted(saved)
    return [Change(key=key, old=old[key], new=value) for key, value in _dotted(new).items() if key in old and old[key] != value]


def arch_changes(saved: Mapping[str, Any], arch: Arch) -> list[Change]:
    """Fields of the model that differ, as keys of the config. One that a saved model lacks is younger than it and had its default."""
    pairs = [(field.name, saved.get(field.name, field.default), getattr(arch, field.name)) for field in fields(Arch)]
    return [Change(key=f"model.{name}", old=old, new=new) for name, old, new in pairs if old is not MISSING and old != new]


def problems(manifest: Manifest, config: Config, arch: Arch, learning_rate: LearningRate) -> list[str]:
    """Why a run must not go on like this, one line each; empty when it may."""
    found = [f"resume: {change} makes another model: leave it out, or start a new run with --checkpoint.init_from"
             for change in arch_changes(manifest.arch, arch)]
    if config.checkpoint.allow_changes:
        return found
    changes = config_changes(manifest.config, asdict(config))
    rate = [change for change in changes if change.key in _RATE_KEYS]
    if effect := rate and _rate_effect(manifest, config, learning_rate):
        verb = "changes" if len(rate) == 1 else "change"
        found.append(f"resume: {', '.join(map(str, rate))} {verb} the learning rate {effect}: add --checkpoint.allow_changes true")
    for change in changes:
        if change.key not in _RATE_KEYS and not any(_starts(change.key, prefix) for prefix in _FREE):
            what = max((prefix for prefix in _CHANGES if _starts(change.key, prefix)), key=len)
            found.append(f"resume: {change} changes {_CHANGES[what]}: add --checkpoint.allow_changes true")
    return found


def data_problems(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where the data or tokenizer that a run reads under the same names is not what it was, one line each.

    saved, now: {"tokenizer": fingerprint, "data": {"training": report}}, as a checkpoint's `extra` keeps them.
    """
    found = []
    if saved.get("tokenizer") != now.get("tokenizer"):
        found.append("resume: data.tokenizer is not the tokenizer that the run began with: its file has changed: put the old one back, "
                     "or start a new run with --init_from")
    old, new = _sources(saved), _sources(now)
    if old.keys() == new.keys():  # other names are a change of the config, or of paths
        found += [f"resume: {name} is not the data that the run began with: {key} {old[name][key]:,} -> {value:,}: put the old data back, "
                  "or go on with this one: add --checkpoint.allow_changes true"
                  for name, sizes in new.items() for key, value in sizes.items() if value != old[name].get(key, value)][:1]
    return found


def _sources(extra: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Sizes of the training data by source; a source of rows of the user's is one."""
    data = extra.get("data") or {}
    training = data.get("training")
    if isinstance(training, Mapping):
        return {source["name"]: {key: source[key] for key in ("tokens", "rows")} for source in training["sources"]}
    return {} if training is None else {"data.source": {"rows": training}}


def _starts(key: str, prefix: str) -> bool:
    return not prefix or f"{key}.".startswith(f"{prefix}.")


def _rate_effect(manifest: Manifest, config: Config, learning_rate: LearningRate) -> str | None:
    """The first update, of those both schedules have, whose learning rate differs."""
    known = {field.name for field in fields(OptimConfig)}
    saved = OptimConfig(**{name: value for name, value in manifest.config.get("optim", {}).items() if name in known})
    steps = manifest.config.get("train", {}).get("steps", TrainConfig.steps)
    old, new = learning_rate(saved, steps), learning_rate(config.optim, config.train.steps)
    first, end = manifest.updates, max(min(steps, config.train.steps), manifest.updates + 1)
    for update in range(first, end, max((end - first) // _SAMPLES, 1)):
        before, after = float(old(update)), float(new(update))
        if not isclose(before, after, rel_tol=1e-5):
            return f"at update {update} from {_scientific(before)} to {_scientific(after)}"
    return None


def _dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}. Two levels: a value may be a dict itself."""
    out: dict[str, Any] = {}
    for section, value in values.items():
        out |= {f"{section}.{name}": inner for name, inner in value.items()} if isinstance(value, Mapping) else {section: value}
    return out


def _show(value: Any) -> str:
    return "null" if value is None else str(value)


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"
