"""The config: does it break a rule, does its data fit, and what does its batch come to? Without jax, without tokenising.

`config` puts together what `validate` says, what can be told of the data, and the arithmetic of a step in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from jaxmeg.arch import num_params, resolve_arch
from jaxmeg.config import Axis, Config, Resolved, resolve
from jaxmeg.data.store import DataError, MappedStore, open_store, store_prefix
from jaxmeg.data.tokenizer import load_tokenizer
from jaxmeg.doctor.finding import Finding, Problem, conclude, problem_of
from jaxmeg.validate.check import bubble_line, mesh_line, problems, warnings

NAME = "config"
MOMENTS = {"adamw": 2, "muon": 1, "lion": 1, "adafactor": 0, "sgd": 1}  # values a parameter, nearly


def state_bytes(config: Config) -> int | None:
    """About what a checkpoint has: fp32 parameters and moments. None for a module of the user's."""
    if config.model.module is not None:
        return None
    return num_params(resolve_arch(config.model)) * 4 * (1 + MOMENTS[config.optim.name])


def config(config: Config, num_devices: int, is_given: bool, wrong: tuple[str, ...] = ()) -> Finding:
    """wrong: what keeps a run from starting before its config is looked at. is_given: whether there is a config to judge at all."""
    if wrong:
        return conclude(NAME, "", [problem_of("FAIL", line) for line in wrong])
    if not is_given:
        return Finding(name=NAME, status="skipped", line="none given: add --config FILE, --mesh and so on to check a run's")
    if found := problems(config, num_devices):
        return conclude(NAME, "", [problem_of("FAIL", line) for line in found])
    resolved = resolve(config, num_devices)
    try:
        tokens, vocabulary = _of_data(config)
    except DataError as error:
        return conclude(NAME, "", [problem_of("FAIL", str(error))])
    costly = [problem_of("warn", line) for line in warnings(config, num_devices)]
    doubts = [*_vocabulary(resolved.arch.vocab_size, vocabulary), *costly]
    return conclude(NAME, batch_line(config, resolved), doubts, _details(config, resolved, tokens))


def batch_line(config: Config, resolved: Resolved) -> str:
    """A step's batch in words: rows = microbatches x rows x data ranks."""
    ranks = resolved.mesh[Axis.REP] * resolved.mesh[Axis.DP] * resolved.mesh[Axis.EP]
    rows = config.data.global_batch
    parts = ((resolved.num_microbatches, "microbatch", "es"), (resolved.microbatch, "row", "s"), (ranks, "data rank", "s"))
    text = f"{rows} rows = " + " x ".join(f"{count} {noun}{plural if count != 1 else ''}" for count, noun, plural in parts)
    if config.model.module is None:
        text += f", {rows * config.data.seq_len:,} tokens an update"
    return text + (f", bubble {float(resolved.bubble):.1%}" if resolved.schedule else "")


def _details(config: Config, resolved: Resolved, tokens: int | None) -> Iterator[str]:
    yield f"mesh {mesh_line(resolved)}"
    if resolved.schedule:
        yield f"{resolved.schedule}: {bubble_line(resolved)}"
    if config.model.module is None:
        yield f"{num_params(resolved.arch):,} parameters, vocabulary {resolved.arch.vocab_size:,}"
    if tokens is not None and config.data.packing == "concat":
        updates, steps = updates_an_epoch(config, tokens), config.train.steps
        yield f"about {tokens:,} tokens: {updates:,} updates an epoch, {steps / max(updates, 1):.1f} epochs in {steps:,} updates"


def updates_an_epoch(config: Config, tokens: int) -> int:
    """Whole updates that rows of one token stream give, without what is kept for validation."""
    kept = tokens if config.data.validation is not None else int(tokens * (1 - config.data.validation_fraction))
    return max(kept - 1, 0) // config.data.seq_len // config.data.global_batch


def _of_data(config: Config) -> tuple[int | None, int | None]:
    """(tokens of the training data, a vocabulary that holds all its ids), each None where reading it all would be needed.

    Raises DataError for a damaged store or tokenizer.
    """
    data = config.data
    if config.model.module is not None:
        return None, None
    tokenizer = load_tokenizer(data.tokenizer)
    names = list(data.train) if isinstance(data.train, dict) else [data.train]
    stores = [_store(name) for name in names]
    sizes = [_tokens(name, store, data.tokenizer == "bytes") for name, store in zip(names, stores, strict=True)]
    known = [store.about.vocab_size for store in stores if store and store.about]
    texts = [tokenizer.vocab_size] if None in stores else []
    total = [size for size in sizes if size is not None]
    return sum(total) if len(total) == len(sizes) else None, max([*known, *texts], default=None)


def _store(name: str | None) -> MappedStore | None:
    prefix = None if name is None else store_prefix(Path(name).expanduser())
    return open_store(prefix) if prefix else None


def _tokens(name: str | None, store: MappedStore | None, in_bytes: bool) -> int | None:
    if store:
        return int(store.lengths.sum())
    if name is None and in_bytes:
        return len((resources.files("jaxmeg.data") / "shakespeare.txt").read_bytes())
    path = Path(name or "").expanduser()
    return path.stat().st_size if in_bytes and path.suffix == ".txt" and path.is_file() else None


def _vocabulary(of_model: int, of_data: int | None) -> Iterator[Problem]:
    if of_data is not None and of_data > of_model:
        yield Problem("FAIL", f"model.vocab_size={of_model} is too small for the data, whose token ids go up to {of_data - 1}",
                      f"use --model.vocab_size {of_data} or more")
