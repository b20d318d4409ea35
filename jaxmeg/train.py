"""The training run: from a config to trained weights, read top to bottom.

`scripts/train.py` -> `run(config)` -> `step.make_train_step(setup)`. Data formats, resume and the full run record are
not here; the run folder gets the config, metrics.jsonl and the final weights.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml

from jaxmeg.config import Config
from jaxmeg.data.text import open_text, read_text
from jaxmeg.evaluate import make_evaluate, sample
from jaxmeg.hardware import peak_tflops
from jaxmeg.mesh import format_mesh
from jaxmeg.report import Progress, Result, print_layout, print_sample, print_setup, print_summary
from jaxmeg.setup import Setup, build
from jaxmeg.state import canonical, init_state
from jaxmeg.step import Metrics, make_train_step, place_rows


class RunError(RuntimeError):
    """The run cannot go on; the message says at which step, why, and what to change."""


def run(config: Config, devices: list[Any] | None = None) -> Result | None:
    """Train as the config says, on the given devices or all that jax sees; None if only the layout was to be shown.

    Raises RunError, and DataError for a text that is too short.
    """
    devices = jax.devices() if devices is None else devices
    setup = build(config, devices)
    print_setup(setup)
    if config.show_layout:
        print_layout(setup)
        return None

    tokens, name = read_text(config.data.text)
    data = open_text(tokens, config.data.seq_len, config.data.validation_fraction, config.train.seed, config.data.global_batch)
    print(f"data        {name}: {len(tokens):,} bytes, {data.num_training:,} training and {data.num_validation:,} validation "
          f"rows of {data.seq_len}, {data.num_training / config.data.global_batch:.0f} updates an epoch")
    folder = _new_folder(Path(config.train.out))
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))

    started = time.perf_counter()
    state = init_state(setup, config.train.seed)
    step = make_train_step(setup)
    evaluate = make_evaluate(setup)
    M = setup.resolved.num_microbatches

    def rows(update: int) -> Any:
        batch = data.batch(update, config.data.global_batch)
        return place_rows(setup, batch.inputs, batch.labels, batch.mask, M)

    compiled = step.lower(state, rows(0)).compile()
    compile_seconds = time.perf_counter() - started

    losses: list[float] = []
    validation: tuple[float, int] | None = None
    loop_started, evaluating = time.perf_counter(), 0.0
    with Progress(setup) as progress, (folder / "metrics.jsonl").open("w") as log:
        for n in range(config.train.steps):
            state, metrics = compiled(state, rows(n))
            record = _read(setup, n, metrics)
            losses.append(record["loss"])
            log.write(json.dumps(record) + "\n")
            progress.step(record)
            _check_skips(setup, n, metrics, int(state.skipped))
            last = n + 1 == config.train.steps
            if data.num_validation and (last or (config.train.eval_every and (n + 1) % config.train.eval_every == 0)):
                at = time.perf_counter()
                validation = evaluate(state.params, data.validation(config.train.eval_rows))
                evaluating += time.perf_counter() - at
                log.write(json.dumps({"step": n + 1, "validation_loss": validation[0], "validation_tokens": validation[1]}) + "\n")
                progress.validation(n + 1, *validation)
    seconds = time.perf_counter() - loop_started - evaluating

    text = b""
    if config.train.sample_tokens:
        prompt = config.train.sample_prompt.encode()
        text = bytes(min(t, 255) for t in sample(setup, state.params, prompt, config.train.sample_tokens, 0.8, config.train.seed))
        print_sample(config.train.sample_prompt, text)
    _save_weights(setup, state.params, folder / "weights")
    result = Result(
        setup=setup, losses=losses, validation_loss=validation[0] if validation else None,
        validation_tokens=validation[1] if validation else 0, sample=text, folder=folder, seconds=seconds,
        compile_seconds=compile_seconds,
        tokens_per_second=config.train.steps * config.data.global_batch * config.data.seq_len / seconds)
    print_summary(result, format_mesh(setup.layout.sizes), peak_tflops(devices[0].device_kind))
    return result


def _read(setup: Setup, n: int, metrics: Metrics) -> dict[str, Any]:
    return {
        "step": n + 1, "loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm),
        "lr": float(metrics.learning_rate), "tokens": int(metrics.tokens), "applied": bool(metrics.finite),
        "loss_scale": float(metrics.loss_scale),
    }


def _check_skips(setup: Setup, n: int, metrics: Metrics, skipped: int) -> None:
    """Say which leaf made an update be skipped, and stop after too many in a row.

    fp16 starts with a large loss scale on purpose: there skips only count once the scale has fallen to 1.
    """
    if bool(metrics.finite):
        return
    paths = [leaf.path for leaf in jax.tree.leaves(setup.layout.leaves, is_leaf=lambda x: hasattr(x, "path"))]
    bad = np.flatnonzero(~np.asarray(metrics.leaf_finite))
    where = f"the first of {len(bad)} gradient leaves that are not finite is {paths[bad[0]]}" if len(bad) else "the loss is not finite"
    scale = float(metrics.loss_scale)
    print(f"step {n + 1}: update skipped, {where}" + (f"; loss scale {scale:g} halves" if setup.compute == "fp16" else ""),
          file=sys.stderr)
    limit = setup.config.optim.max_skipped_updates
    if skipped >= limit and (setup.compute != "fp16" or scale <= 1):
        raise RunError(f"stopped at step {n + 1}: {skipped} updates in a row were skipped (optim.max_skipped_updates={limit}); {where}: "
                       "lower optim.lr, lengthen optim.warmup, or look at the data of these steps")


def _new_folder(wanted: Path) -> Path:
    """The folder, or the next free NAME-2, NAME-3, ... if it holds an earlier run: nothing is overwritten."""
    folder, count = wanted, 1
    while (folder / "config.yaml").exists():
        count += 1
        folder = wanted.with_name(f"{wanted.name}-{count}")
    if count > 1:
        print(f"run folder  {wanted} holds an earlier run: this one goes to {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _save_weights(setup: Setup, params: Any, folder: Path) -> None:
    """Canonical weights, fp32: the same tree whatever the layout."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), canonical(setup, params))
