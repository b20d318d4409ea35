"""Evaluation and sampling on the training layout, through the forward-only schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxmeg.data.dataset import Rows as HostRows
from jaxmeg.setup import Setup
from jaxmeg.step import local_rows, make_eval_step, make_next_logits, place_rows


def make_evaluate(setup: Setup) -> Callable[[Any, Iterable[HostRows]], tuple[float, int]]:
    """(params, batches of at most data.global_batch rows) -> (mean loss in nats a token, tokens).

    Batches are filled up with rows that do not count, so the result does not depend on batch size or layout and nothing
    compiles twice.
    """
    num_microbatches, size = setup.resolved.num_microbatches, setup.config.data.global_batch
    step, mine = make_eval_step(setup, num_microbatches), local_rows(setup, size, num_microbatches)

    def evaluate(params: Any, batches: Iterable[HostRows]) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for rows in batches:
            part = rows.filled(size).take(mine)
            placed = place_rows(setup, part.inputs, part.labels, part.mask, num_microbatches, part.segments)
            loss, count = step(params, placed)
            total, tokens = total + float(loss), tokens + int(count)
        return total / max(tokens, 1), tokens

    return evaluate


def sample(setup: Setup, params: Any, prompt: list[int], num_tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """Continue a prompt token by token: the whole window is run for each token, no cache. Yields token ids."""
    next_logits = make_next_logits(setup)
    window, ranks = setup.config.data.seq_len, setup.data_ranks
    tokens, rng = list(prompt) or [0], np.random.default_rng(seed)
    mine = len(local_rows(setup, ranks, 1))
    for _ in range(num_tokens):
        context = tokens[-window:]
        inputs = np.zeros((mine, window), np.int32)  # every data rank runs the same row
        inputs[:, : len(context)] = context
        rows = place_rows(setup, inputs, inputs, np.ones(inputs.shape, bool), 1)
        logits = next_logits(params, rows, np.int32(len(context) - 1)).addressable_shards[0].data
        z = np.asarray(logits, np.float64)[0]
        if temperature == 0:
            token = int(z.argmax())
        else:
            p = np.exp((z - z.max()) / temperature)
            token = int(rng.choice(len(p), p=p / p.sum()))
        tokens.append(token)
        yield token
