"""What a run trains on what: text on the decoder, or a source of rows on a module of the user's. The loop in `train` sees a `Task`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxmeg.cli import ConfigError
from jaxmeg.config import Config
from jaxmeg.data.dataset import Dataset, Rows, open_data
from jaxmeg.data.loader import batches, read_ahead
from jaxmeg.data.report import print_reports
from jaxmeg.data.source import RowSource, RowStream, open_rows
from jaxmeg.data.store import DataError
from jaxmeg.data.tokenizer import Tokenizer, load_tokenizer
from jaxmeg.engine import Microbatches, own_setup, own_state
from jaxmeg.evaluate import make_evaluate, sample
from jaxmeg.own_step import Loss, make_own_eval_step, own_gradients
from jaxmeg.report import tokenizing
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, init_state
from jaxmeg.step import local_rows, make_train_step, place_rows
from jaxmeg.validate.check import problems
from jaxmeg.validate.run_rules import unread
from jaxmeg.validate.speed_rules import attention_here, fp8_emulated

Evaluate = Callable[[Any, Callable[[], object]], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the loop needs to know of model and data."""

    setup: Setup
    init: Callable[[], TrainState]
    step: Any
    """The jitted train step."""
    read: Callable[[int, int], Generator[tuple[int, Any], None, None]]
    """(first update, rows consumed before it) -> (update, its batch on the devices), to the last update of the run."""
    evaluate: Evaluate | None
    """(params, called before each batch) -> (mean loss, tokens or weight), or None where no rows are kept for it."""
    data: dict[str, Any]
    """What was read, for the record."""
    print_data: Callable[[Console], object]
    """The same for people."""
    tokenizer: Tokenizer | None = None

    def sample(self, params: Any) -> str | None:
        """A piece of text from the model, if there is one."""
        train = self.setup.config.train
        if self.tokenizer is None or not train.sample_tokens:
            return None
        prompt = self.tokenizer.encode_batch([train.sample_prompt])[0].tolist()
        return self.tokenizer.decode(list(sample(self.setup, params, prompt, train.sample_tokens, 0.8, train.seed)))


def text_task(config: Config, devices: Sequence[Any]) -> Task:
    """The decoder of `config.model` on the documents of `config.data`. Raises ConfigError, DataError."""
    if found := [*problems(config, len(devices)), *_not_as_started(config, devices)]:
        raise ConfigError(found)
    setup = build(config, devices)
    _warn_of_unread(setup)
    training, validation = open_data(config.data, config.train.seed, tokenizing())
    _check_vocabulary(setup, training, validation)
    M, size = setup.resolved.num_microbatches, config.data.global_batch
    mine = local_rows(setup, size, M)

    def place(rows: Rows) -> Any:
        return place_rows(setup, rows.inputs, rows.labels, rows.mask, M, rows.segments)

    datasets = [dataset for dataset in (training, validation) if dataset is not None]
    return Task(
        setup=setup, init=lambda: init_state(setup, config.train.seed), step=make_train_step(setup),
        read=lambda first, consumed: batches(training, size, first, config.train.steps, mine, config.data.prefetch, consumed, place),
        evaluate=None if validation is None else _text_evaluate(setup, validation),
        data={dataset.report.split: dataset.report.as_dict() for dataset in datasets},
        print_data=lambda console: print_reports(console, *(dataset.report for dataset in datasets)),
        tokenizer=load_tokenizer(config.data.tokenizer))


def _not_as_started(config: Config, devices: Sequence[Any]) -> Iterator[str]:
    """Options on devices and processes that jax was started without: they have no effect once it runs."""
    platform, count = devices[0].platform, config.distributed.num_processes
    if config.emulate is not None and (platform != "cpu" or len(devices) != config.emulate):
        yield (f"emulate={config.emulate} has no effect on a jax that runs on {len(devices)} {platform} devices: leave emulate out, or "
               f"start with scripts/train.py")
    if count is not None and count != jax.process_count():
        yield (f"distributed.num_processes={count} has no effect on a jax of {jax.process_count()} processes: leave it out, or start with "
               f"scripts/train.py")


def _warn_of_unread(setup: Setup) -> None:
    device = setup.mesh.devices.flat[0]
    if jax.process_index() == 0:
        lines = [*unread(setup.config, own=setup.own, compute=setup.compute, platform=device.platform,
                         num_devices=setup.mesh.devices.size, num_processes=jax.process_count())]
        if not setup.own:
            lines += attention_here(setup.config, setup.model.options.kernel, setup.kernel_reason, setup.attention_scores)
            lines += fp8_emulated(setup.config, device.platform, getattr(device, "compute_capability", None))
        for line in lines:
            print(f"warning: {line}", file=sys.stderr)


def _check_vocabulary(setup: Setup, *datasets: Dataset | None) -> None:
    needed = max(dataset.vocab_size for dataset in datasets if dataset is not None)
    if needed > setup.resolved.arch.vocab_size:
        raise DataError(f"model.vocab_size={setup.resolved.arch.vocab_size} is too small for the data, whose token ids go up to "
                        f"{needed - 1}: use --model.vocab_size {needed} or more")


def _text_evaluate(setup: Setup, validation: Dataset) -> Evaluate:
    evaluate, size, wanted = make_evaluate(setup), setup.config.data.global_batch, setup.config.train.eval_rows
    count = min(wanted or validation.rows_per_epoch, validation.rows_per_epoch)

    def run(params: Any, begin: Callable[[], object]) -> tuple[float, float]:
        def batches() -> Iterator[Rows]:
            for first in range(0, count, size):
                begin()
                yield validation.rows(np.arange(first, min(first + size, count)))

        return evaluate(params, batches())

    return run


def own_task(config: Config, devices: Sequence[Any], module: Any, loss: Loss, source: RowSource) -> Task:
    """A module of the user's on a source of rows. Raises ConfigError, OwnModuleError, DataError."""
    if found := list(_not_as_started(config, devices)):
        raise ConfigError(found)
    setup = own_setup(module, config, devices)
    _warn_of_unread(setup)
    stream = open_rows(source, config.train.seed, config.data.validation_fraction)
    size, place = config.data.global_batch, Microbatches(setup)

    def read(first: int, consumed: int) -> Generator[tuple[int, Any], None, None]:
        def one(update: int) -> Any:
            return place(stream.training(consumed + (update - first) * size + np.arange(size)))
        return read_ahead(one, first, config.train.steps, config.data.prefetch)

    return Task(
        setup=setup, init=lambda: own_state(setup), step=make_train_step(setup, own_gradients(setup, loss)), read=read,
        evaluate=_own_evaluate(setup, loss, stream, place) if stream.num_validation else None,
        data={"rows": len(source), "training": stream.num_training, "validation": stream.num_validation},
        print_data=lambda console: console.print(
            f"data        {stream.num_training:,} training and {stream.num_validation:,} validation rows, "
            f"{stream.num_training / size:,.1f} updates an epoch", soft_wrap=True))


def _own_evaluate(setup: Setup, loss: Loss, stream: RowStream, place: Microbatches) -> Evaluate:
    step, size, wanted = make_own_eval_step(setup, loss), setup.config.data.global_batch, setup.config.train.eval_rows
    count = min(wanted or stream.num_validation, stream.num_validation)

    def run(params: Any, begin: Callable[[], object]) -> tuple[float, float]:
        total = weight = 0.0
        for first in range(0, count, size):
            begin()
            value, more = step(params, place(stream.validation(first, min(size, count - first)), fill=True))
            total, weight = total + float(value), weight + float(more)
        return total / max(weight, 1e-12), weight

    return run
