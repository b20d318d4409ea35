"""Evaluation and sampling on the training layout, through the forward-only schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxmeg.data.text import Rows as HostRows
from jaxmeg.setup import Setup
from jaxmeg.step import make_eval_step, make_next_logits, place_rows


def make_evaluate(setup: Setup) -> Callable[[Any, HostRows], tuple[float, int]]:
    """(params, rows) -> (mean loss in nats a token, tokens). Any number of rows: the last batch is filled up with rows
    that do not count, so the result does not depend on batch size or layout and nothing compiles twice."""
    num_microbatches, size = setup.resolved.num_microbatches, setup.config.data.global_batch
    step = make_eval_step(setup, num_microbatches)

    def evaluate(params: Any, rows: HostRows) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for start in range(0, len(rows.inputs), size):
            part = slice(start, start + size)
            batch = HostRows(inputs=rows.inputs[part], labels=rows.labels[part], mask=rows.mask[part]).filled(size)
            loss, count = step(params, place_rows(setup, batch.inputs, batch.labels, batch.mask, num_microbatches))
            total, tokens = total + float(loss), tokens + int(count)
        return total / max(tokens, 1), tokens

    return evaluate


def sample(setup: Setup, params: Any, prompt: bytes, num_tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """Continue a prompt byte by byte: the whole window is run for each token, no cache. Yields token ids."""
    next_logits = make_next_logits(setup)
    window, ranks = setup.config.data.seq_len, setup.data_ranks
    tokens, rng = list(prompt) or [0], np.random.default_rng(seed)
    for _ in range(num_tokens):
        context = tokens[-window:]
        inputs = np.zeros((ranks, window), np.int32)
        inputs[:, : len(context)] = context
        rows = place_rows(setup, inputs, inputs, np.ones(inputs.shape, bool), 1)
        z = np.asarray(next_logits(params, rows, np.int32(len(context) - 1)), np.float64)[0]
        if temperature == 0:
            token = int(z.argmax())
        else:
            p = np.exp((z - z.max()) / temperature)
            token = int(rng.choice(len(p), p=p / p.sum()))
        tokens.append(token)
        yield token
