"""What a Megatron-LM command says of data, evaluation and checkpoints to start from.

Megatron's token stores are read as they are: a prefix X stands for X.bin and X.idx. Its default lets documents of a row
see each other; ours does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmeg.migrate.core import ABSENT, Migration, NoCounterpart, differs, equals, never, not_needed, whole
from jaxmeg.migrate.megatron_model import tokenizer_file
from jaxmeg.migrate.shared import find, lack, put

PATHS = {"--data-path": "data.train", "--train-data-path": "data.train", "--valid-data-path": "data.validation",
         "--tokenizer-model": "data.tokenizer", "--save": "train.out"}
"""Arguments whose value may be set elsewhere, and what to set then."""
UNREAD = ("--load", "--tensorboard-dir")
"""Arguments whose value does not matter."""
RESETS = ("--reset-position-ids", "--reset-attention-mask")


def put_data(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    """Sources, the share for validation, the tokenizer, and whether documents see each other."""
    training = find(given, "--data-path") or find(given, "--train-data-path")
    validation = find(given, "--valid-data-path")
    put(out, training, "data.train", read_blend, "its .bin and .idx")
    put(out, validation, "data.validation", read_blend)
    lack(out, find(given, "--test-data-path"), differs("there is no third set"))
    lack(out, find(given, "--mock-data"), differs("without data.train a run reads the text that ships", off=never))
    split = find(given, "--split", "969,30,1" if is_whole and training and not validation else ABSENT)
    if validation is not None:
        lack(out, split, not_needed("data.validation is given"))
    else:
        put(out, split, "data.validation_fraction", read_split, "the test part is trained on")
    _put_tokenizer(given, out, has_store=training is not None)
    _put_separate(given, out, is_whole)


def _put_tokenizer(given: Mapping[str, Any], out: Migration, has_store: bool) -> None:
    model = find(given, "--tokenizer-model")
    file = tokenizer_file(str(model.value)) if model else None
    if model is not None and file is not None:
        put(out, model, "data.tokenizer", lambda _: str(file))
    for name in ("--tokenizer-model", "--tokenizer-type"):
        if not out.has_row(name):
            lack(out, find(given, name), not_needed("data.tokenizer says it") if file else differs(
                "a tokenizer is a tokenizer.json: --set data.tokenizer=PATH", off=equals("NullTokenizer")))
    if has_store and file is None and "data.tokenizer" not in out.settings:
        out.remarks.append("a token store is read with the tokenizer that made it: --set data.tokenizer=PATH to its tokenizer.json")


def _put_separate(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    masking = find(given, "--dataloader-inter-document-masking")
    apart = masking is not None or all(name in given for name in RESETS)
    put(out, masking, "data.separate", lambda _: True)
    for name in RESETS:
        if apart:
            put(out, find(given, name), "data.separate", lambda _: True)
        else:
            lack(out, find(given, name), differs("only both together: data.separate"))
    if is_whole and not apart:
        out.put(RESETS[1], ABSENT, "data.separate", False, "documents of a row see each other")
    ends = find(given, "--eod-mask-loss")
    if out.get("data.separate"):
        lack(out, ends, not_needed("no token is trained to predict the next document"))
    else:
        lack(out, ends, differs("it comes with data.separate", off=never))


def put_evaluation(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    """train.eval_rows from a number of batches, none for 0; and where a run starts from."""
    batches = find(given, "--eval-iters", 100 if is_whole else ABSENT)
    rows = out.get("data.global_batch")
    if batches is not None and str(batches.value) == "0":
        out.put(batches.key, batches.shown, "data.validation_fraction", 0.0, "no evaluation")
    elif "--full-validation" in given:
        lack(out, batches, not_needed("every validation row is evaluated"))
    else:
        put(out, batches, "train.eval_rows", lambda count: whole(count) * rows, f"x {rows} rows")
    load, save = find(given, "--load"), find(given, "--save")
    if load is not None and save is not None and load.value == save.value:
        lack(out, load, not_needed("--resume goes on with a run folder"))
    else:
        lack(out, load, differs("checkpoints of Megatron are not read; --resume and --init_from take run folders", off=never))


def read_blend(value: Any) -> str | dict[str, float]:
    """A path, or paths with the weight before each. Raises NoCounterpart for several without weights."""
    parts = value if isinstance(value, list) else [value]
    if len(parts) == 1:
        return str(parts[0])
    try:
        weights = [float(part) for part in parts[::2]]
    except ValueError:
        weights = []
    if len(weights) * 2 != len(parts):
        raise NoCounterpart("several paths without weights: give the weight before each")
    blend: dict[str, float] = {}
    for weight, path in zip(weights, parts[1::2]):
        blend[path] = blend.get(path, 0.0) + weight
    return blend


def read_split(value: Any) -> float:
    """The share of the second part of "949,50,1". Raises ValueError for anything but numbers."""
    parts = [float(part) for part in str(value).split(",")]
    return round(parts[1] / sum(parts), 6) if len(parts) > 1 else 0.0
