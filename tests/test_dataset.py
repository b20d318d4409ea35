"""Rows by number: every target of an epoch once, against a plain reading of the rules; borders, padding, epochs, split, report."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxmeg.config import DataConfig
from jaxmeg.data.dataset import Rows, make_dataset, open_data
from jaxmeg.data.report import print_reports
from jaxmeg.data.split import split
from jaxmeg.data.store import DataError, MemoryStore, ReadCounts

CONFIG = DataConfig(seq_len=12, global_batch=4)


def store_of(lengths, name="a", first_id=0) -> MemoryStore:
    """Documents in which every token has an id of its own: first_id, first_id + 1, ..."""
    ids = np.arange(first_id, first_id + sum(lengths))
    return MemoryStore(name, np.split(ids, np.cumsum(lengths)[:-1]), first_id + sum(lengths))


def make(lengths, seed=0, shuffle=True, **changes):
    return make_dataset([(store_of(lengths), 1.0)], replace(CONFIG, **changes), seed, shuffle=shuffle)


def all_rows(dataset, epoch=0) -> Rows:
    """Every row of an epoch of a dataset with one source."""
    return dataset.rows(epoch * dataset.rows_per_epoch + np.arange(dataset.rows_per_epoch))


def trained(rows: Rows) -> Counter:
    """(input, label) -> how often it is trained."""
    return Counter(zip(rows.inputs[rows.mask].tolist(), rows.labels[rows.mask].tolist(), strict=True))


# A plain reading of the rules, on lists of tokens.
def usable_documents(documents, config) -> list[list[int]]:
    least = 2 if config.separate or config.packing == "none" else 1
    documents = [tokens for tokens in documents if len(tokens) >= least]
    if config.packing != "concat" and config.long_documents == "drop":
        return [tokens for tokens in documents if len(tokens) <= config.seq_len]
    if config.packing != "concat" and config.long_documents == "truncate":
        return [tokens[: config.seq_len] for tokens in documents]
    return documents


def pairs_within(documents) -> Counter:
    return Counter(pair for tokens in documents for pair in pairwise(tokens))


def concat_rows(documents, config):
    """Lists of (inputs, labels with None where there is none, document of each) of documents in their order."""
    stream = [(token, number) for number, tokens in enumerate(documents) for token in tokens]
    for at in range(0, len(stream) - 1, config.seq_len):
        row = stream[at : at + config.seq_len]
        behind = [*stream[at + 1 : at + config.seq_len + 1], (None, None)][: len(row)]
        labels = [label if number == now or not config.separate else None
                  for (_, now), (label, number) in zip(row, behind, strict=True)]
        yield [token for token, _ in row], labels, [number for _, number in row]


def unpadded(rows: Rows, row: int, used: int):
    """Inputs, labels and documents of a row, in the form of `concat_rows`; the rest must be padding."""
    assert not rows.mask[row, used:].any() and not rows.inputs[row, used:].any() and not rows.labels[row, used:].any()
    labels = [label if is_trained else None for label, is_trained in zip(rows.labels[row, :used], rows.mask[row, :used], strict=True)]
    return rows.inputs[row, :used].tolist(), labels


CASES = dict(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=25),
    seq_len=st.integers(1, 12),
    packing=st.sampled_from(["concat", "fit", "none"]),
    long_documents=st.sampled_from(["split", "truncate", "drop"]),
    separate=st.booleans(),
    seed=st.integers(0, 3),
)


@settings(max_examples=400, deadline=None)
@given(**CASES)
def test_every_target_of_an_epoch_is_trained_once(lengths, seq_len, packing, long_documents, separate, seed):
    config = replace(CONFIG, seq_len=seq_len, packing=packing, long_documents=long_documents, separate=separate)
    store = store_of(lengths)
    documents = usable_documents([store.read(number, 0, length).tolist() for number, length in enumerate(lengths)], config)
    inside = pairs_within(documents)
    assume(sum(map(len, documents)) > 1)
    dataset = make_dataset([(store, 1.0)], config, seed, shuffle=True)
    rows = all_rows(dataset)
    found = trained(rows)
    if separate or packing == "none":
        assert found == inside
    else:
        assert found & inside == inside and set(found.values()) <= {1}
        across = found - inside
        assert {before for before, _ in across} <= {tokens[-1] for tokens in documents}
        if packing == "concat":  # one stream: all but its first token are labels
            assert len(across) == len(documents) - 1
    assert found.total() == dataset.report.sources[0].trained_tokens
    assert trained(all_rows(dataset, epoch=3)) == found


@settings(max_examples=200, deadline=None)
@given(lengths=CASES["lengths"], seq_len=CASES["seq_len"], separate=CASES["separate"], shuffle=st.booleans())
def test_concat_is_the_stream_cut_every_seq_len_tokens(lengths, seq_len, separate, shuffle):
    config = replace(CONFIG, seq_len=seq_len, separate=separate)
    store = store_of(lengths)
    documents = usable_documents([store.read(number, 0, length).tolist() for number, length in enumerate(lengths)], config)
    assume(sum(map(len, documents)) > 1)
    dataset = make_dataset([(store, 1.0)], config, 7, shuffle=shuffle)
    rows, origin = all_rows(dataset), dataset.origin(np.arange(dataset.rows_per_epoch))
    stored = np.argsort([row for _, _, row in origin])
    if shuffle:  # the order of the documents, as seen in the rows
        order = list(dict.fromkeys(document for row in stored.tolist() for document, _, _ in dataset.spans(row)))
        left = [tokens for tokens in documents if tokens[0] not in {store.read(d, 0, 1)[0] for d in order}]
        assert all(len(tokens) == 1 for tokens in left)  # only a last token can be missing
        documents = [store.read(d, 0, int(store.lengths[d])).tolist() for d in order] + left
    expected = list(concat_rows(documents, config))
    assert len(expected) == dataset.rows_per_epoch
    for row, (inputs, labels, numbers) in zip(stored.tolist(), expected, strict=True):
        assert unpadded(rows, row, len(inputs)) == (inputs, labels)
        if rows.segments is not None:
            first = numbers[0]
            assert rows.segments[row].tolist() == [number - first + 1 for number in numbers] + [0] * (seq_len - len(inputs))
    shares_a_row = separate and any(len(set(numbers)) > 1 for _, _, numbers in expected)
    assert dataset.has_segments == (rows.segments is not None) == shares_a_row


@settings(max_examples=100, deadline=None)
@given(**CASES)
def test_fit_and_none_keep_pieces_whole(lengths, seq_len, packing, long_documents, separate, seed):
    assume(packing != "concat")
    config = replace(CONFIG, seq_len=seq_len, packing=packing, long_documents=long_documents, separate=separate)
    store = store_of(lengths)
    documents = usable_documents([store.read(number, 0, length).tolist() for number, length in enumerate(lengths)], config)
    assume(documents)
    # A document of n tokens is cut every seq_len tokens; a last token that is the label of the one before it needs no piece.
    pieces = [tuple(tokens[at : at + seq_len]) for tokens in documents for at in range(0, max(len(tokens) - 1, 1), seq_len)]
    dataset = make_dataset([(store, 1.0)], config, seed, shuffle=True)
    found = []
    for row, inputs in enumerate(all_rows(dataset).inputs):
        begin = 0
        spans = dataset.spans(row)
        assert packing == "fit" or len(spans) == 1
        for _, _, length in spans:
            found.append(tuple(inputs[begin : begin + length].tolist()))
            begin += length
    assert sorted(found) == sorted(pieces)


@settings(max_examples=200, deadline=None)
@given(others=CASES["lengths"], rates=st.tuples(st.integers(1, 3), st.integers(1, 3)), **CASES)
def test_rows_of_several_sources_are_filled_span_by_span(others, rates, lengths, seq_len, packing, long_documents, separate, seed):
    """Rows of fit and none in any order over several epochs of two sources, against a loop over the spans of each row."""
    assume(packing != "concat")
    config = replace(CONFIG, seq_len=seq_len, packing=packing, long_documents=long_documents, separate=separate)
    stores = {"a": store_of(lengths, "a"), "b": store_of(others, "b", 1000)}
    for store in stores.values():
        assume(usable_documents([range(length) for length in store.lengths.tolist()], config))
    dataset = make_dataset([(store, float(rate)) for store, rate in zip(stores.values(), rates, strict=True)], config, seed, shuffle=True)
    numbers = np.random.default_rng(seed).integers(0, 5 * dataset.rows_per_epoch, 25)
    rows, separate = dataset.rows(numbers), separate or packing == "none"
    assert dataset.rows(numbers[:0]).inputs.shape == (0, seq_len)
    for at, number in enumerate(numbers.tolist()):
        [(name, _, _)] = dataset.origin(np.array([number]))
        inputs, labels, segments = [], [], []
        for segment, (document, start, length) in enumerate(dataset.spans(number), 1):
            tokens = stores[name].read(document, 0, int(stores[name].lengths[document])).tolist()
            tokens = tokens[:seq_len] if long_documents == "truncate" else tokens
            if not separate and labels:
                labels[-1] = tokens[start]
            inputs += tokens[start : start + length]
            labels += [*tokens[start + 1 : start + length + 1], None][:length]
            segments += [segment] * length
        assert unpadded(rows, at, len(inputs)) == (inputs, labels)
        assert not rows.labels[at][~rows.mask[at]].any()
        assert rows.segments is None or rows.segments[at].tolist() == segments + [0] * (seq_len - len(segments))


@settings(max_examples=100, deadline=None)
@given(lengths=CASES["lengths"], seq_len=CASES["seq_len"], most=st.integers(1, 4), seed=CASES["seed"])
@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_no_row_holds_more_documents_than_it_may(packing, lengths, seq_len, most, seed):
    """Every target once, as without a bound; also where a document that goes on in the next row ends a row that is not full."""
    config = replace(CONFIG, seq_len=seq_len, packing=packing)
    store = store_of(lengths)
    assume(usable_documents([range(length) for length in lengths], config))
    bounded, free = (make_dataset([(store, 1.0)], made, seed, shuffle=True) for made in (replace(config, max_documents=most), config))
    rows = all_rows(bounded)
    assert trained(rows) == trained(all_rows(free))
    assert bounded.report.sources[0].trained_tokens == free.report.sources[0].trained_tokens
    counts = []
    for row in range(bounded.rows_per_epoch):
        inputs, labels, segments = [], [], []
        spans = bounded.spans(row)
        for segment, (document, start, length) in enumerate(spans, 1):
            tokens = store.read(document, 0, int(store.lengths[document])).tolist()
            inputs += tokens[start : start + length]
            labels += [*tokens[start + 1 : start + length + 1], None][:length]
            segments += [segment] * length
        assert unpadded(rows, row, len(inputs)) == (inputs, labels)
        assert rows.segments is None or rows.segments[row].tolist() == segments + [0] * (seq_len - len(segments))
        counts.append(len(spans))
    assert max(counts) == bounded.report.sources[0].most_documents <= most


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_two_documents_in_a_row_have_a_target_less_each(packing):
    """P19: documents of 5 and 7 tokens in a row of 12 are 4 + 6 = 10 targets, not 11."""
    dataset = make([5, 7], packing=packing)
    rows = all_rows(dataset)
    assert rows.inputs.shape == (1, 12) and rows.mask.sum() == 10 == dataset.report.sources[0].trained_tokens
    assert trained(rows) == pairs_within([range(5), range(5, 12)])
    joined = all_rows(make([5, 7], packing=packing, separate=False))
    assert joined.mask.sum() == 11 and joined.segments is None


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_a_document_does_not_depend_on_its_neighbour(packing):
    """P17, as far as the index goes: other tokens in one document change nothing at the positions of the other."""
    config = replace(CONFIG, packing=packing)
    one, two = (make_dataset([(MemoryStore("a", documents, 100), 1.0)], config, 0, shuffle=False)
                for documents in ([np.arange(5), np.arange(10, 17)], [np.arange(50, 55), np.arange(10, 17)]))
    a, b = all_rows(one), all_rows(two)
    assert one.has_segments and a.segments is not None and b.segments is not None
    assert np.array_equal(a.segments, b.segments) and np.array_equal(a.mask, b.mask)
    there = a.segments == (2 if packing == "concat" else 1)  # best fit puts the longer one first
    assert there.sum() == 7
    for name in ("inputs", "labels"):
        assert np.array_equal(getattr(a, name)[there], getattr(b, name)[there])
        assert not np.array_equal(getattr(a, name)[~there], getattr(b, name)[~there])


def test_padding_is_not_read_from_ids():
    """P20: id 0 stands in padding and in documents; only the documents' are inputs that count and labels that are trained."""
    documents = [np.array([0, 5, 0, 0, 7]), np.array([0, 0])]
    dataset = make_dataset([(MemoryStore("zeros", documents, 8), 1.0)], CONFIG, 0, shuffle=False)
    rows = all_rows(dataset)
    assert rows.inputs[0].tolist() == [0, 5, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]
    assert rows.labels[0].tolist() == [5, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0]
    assert rows.mask[0].tolist() == [True] * 4 + [False, True] + [False] * 6
    assert rows.segments is not None and rows.segments[0].tolist() == [1] * 5 + [2] * 2 + [0] * 5


def test_no_segments_where_no_row_is_shared():
    assert make([100], packing="concat").rows(np.arange(3)).segments is None
    assert make([3, 4, 5], packing="none").rows(np.arange(3)).segments is None
    assert make([12, 12], packing="fit").rows(np.arange(2)).segments is None
    assert make([3, 4, 5], packing="fit").rows(np.arange(1)).segments is not None


def test_one_text_is_cut_in_place():
    """Row r of one document is its tokens [r T, r T + T], the last one being a label."""
    rows = all_rows(make([1 + 12 * 7], shuffle=False))
    assert np.array_equal(rows.inputs, np.arange(84).reshape(7, 12))
    assert np.array_equal(rows.labels, np.arange(1, 85).reshape(7, 12)) and rows.mask.all()
    tail = all_rows(make([1 + 12 * 7 + 5], shuffle=False))
    assert tail.inputs[7].tolist() == [*range(84, 90)] + [0] * 6 and tail.mask[7].tolist() == [True] * 5 + [False] * 7


def test_rows_of_padding_are_added():
    rows = make([5, 7, 3]).rows(np.arange(2)).filled(5)
    assert rows.inputs.shape == (5, 12) and rows.inputs.dtype == rows.labels.dtype == np.int32
    assert rows.mask.dtype == bool and rows.mask[:2].any() and not rows.mask[2:].any()
    assert rows.segments is not None and rows.segments[0].any() and not rows.segments[2:].any()


def test_epochs_have_an_order_of_their_own():
    """P40: ten rows; epochs differ, each is complete, and all follow from the seed and the number alone."""
    dataset = make([12] * 10)
    orders = [[row for _, _, row in dataset.origin(epoch * 10 + np.arange(10))] for epoch in range(4)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 4
    for epoch, order in enumerate(orders):
        assert order == np.random.default_rng([0, 0, epoch]).permutation(10).tolist()
    assert [row for _, _, row in make([12] * 10).origin(np.arange(13, 20))] == orders[1][3:]
    assert [row for _, _, row in make([12] * 10, seed=1).origin(np.arange(10))] != orders[0]
    assert [epoch for _, epoch, _ in dataset.origin(np.array([0, 9, 10, 35]))] == [0, 0, 1, 3]


@pytest.mark.parametrize("packing", ["concat", "fit", "none"])
def test_the_seed_orders_the_documents(packing):
    """Which documents are neighbours is drawn for each source and seed, and stays in every epoch."""
    def rows(seed, source):
        stores = [(store_of([3, 4, 5, 6] * 10), 1.0), (store_of([3, 4, 5, 6] * 10), 1.0)]
        return make_dataset(stores, replace(CONFIG, packing=packing), seed, shuffle=True).sources[source].packed.document.tolist()

    orders = [rows(0, 0), rows(0, 1), rows(1, 0)]
    assert orders[0] == rows(0, 0) and len(set(map(tuple, orders))) == 3
    assert all(order != sorted(order) and set(order) == set(range(40)) for order in orders)


def test_numbers_in_any_order_give_the_same_rows():
    dataset = make([5, 9, 30, 2, 17])
    numbers = np.arange(40)
    mixed = np.random.default_rng(0).permutation(numbers)
    assert np.array_equal(dataset.rows(numbers).inputs[mixed], make([5, 9, 30, 2, 17]).rows(mixed).inputs)


def test_long_documents_are_reported():
    """P22: 100 documents, 82 longer than a row."""
    lengths = [30] * 82 + [10] * 18
    for packing in ("fit", "none"):
        [drop] = make(lengths, packing=packing, long_documents="drop").report.sources
        assert (drop.read, drop.kept, drop.dropped) == (100, 18, {"longer than data.seq_len=12": 82})
        assert (drop.tokens, drop.trained_tokens, drop.rows) == (180, 18 * 9, 18) and drop.padding == pytest.approx(2 / 12)
        [cut] = make(lengths, packing=packing, long_documents="truncate").report.sources
        assert (cut.read, cut.kept, cut.dropped, cut.truncated) == (100, 100, {}, 82)
        assert (cut.tokens, cut.trained_tokens) == (82 * 12 + 180, 82 * 11 + 18 * 9)


def test_what_the_store_dropped_is_in_the_report():
    counts = ReadCounts(read=9, kept=4, dropped={"empty": 2, "not valid JSON": 3})
    documents = [np.arange(1), np.arange(5), np.arange(20), np.arange(6)]
    config = replace(CONFIG, packing="fit", long_documents="drop")
    [source] = make_dataset([(MemoryStore("a", documents, 20, counts), 1.0)], config, 0, shuffle=True).report.sources
    assert source.dropped == {"empty": 2, "not valid JSON": 3, "shorter than 2 tokens": 1, "longer than data.seq_len=12": 1}
    assert source.read == 9 == source.kept + sum(source.dropped.values())


@pytest.mark.parametrize("packing", ["concat", "fit", "none"])
def test_max_rows_is_exact(packing):
    """P22: max_rows=10 is exactly 10 rows an epoch, whatever the batch; 7 rows do not divide it."""
    dataset = make([5, 9, 12, 30] * 20, packing=packing, max_rows=10)
    [source] = dataset.report.sources
    assert dataset.rows_per_epoch == source.rows == 10 and source.rows_left_out > 0
    assert source.steps_per_epoch == 10 / 4
    seen = [dataset.origin(update * 7 + np.arange(7)) for update in range(10)]
    seen = [place for places in seen for place in places]
    for epoch in range(7):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == [("a", epoch, row) for row in range(10)]
    assert all_rows(dataset).mask.sum() == source.trained_tokens
    assert len({tuple(row) for row in all_rows(dataset).inputs.tolist()}) == 10


def test_a_mixture_is_exact_and_each_source_has_its_epochs():
    """P42's mixture: 3:1 in every four rows, rows of each source in its own epochs."""
    stores = [(store_of([12] * 5, "a"), 3.0), (store_of([12] * 7, "b", 1000), 1.0)]
    dataset = make_dataset(stores, CONFIG, 0, shuffle=True)
    origin = dataset.origin(np.arange(400))
    for start in range(0, 400, 4):
        assert Counter(name for name, _, _ in origin[start : start + 4]) == {"a": 3, "b": 1}
    for name, rows, taken in (("a", 5, 300), ("b", 7, 100)):
        mine = [(epoch, row) for source, epoch, row in origin if source == name]
        assert len(mine) == taken and [epoch for epoch, _ in mine] == [k // rows for k in range(taken)]
        for epoch in range(taken // rows):
            assert sorted(mine[epoch * rows : (epoch + 1) * rows]) == [(epoch, row) for row in range(rows)]
    inputs = dataset.rows(np.arange(40)).inputs
    assert ["b" if row.min() >= 1000 else "a" for row in inputs] == [name for name, _, _ in origin[:40]]
    a, b = dataset.report.sources
    assert (a.weight, b.weight) == (0.75, 0.25)
    assert a.steps_per_epoch == pytest.approx(5 / 3) and b.steps_per_epoch == 7
    assert dataset.rows_per_epoch == 12


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20), fraction=st.floats(0, 0.999))
def test_the_split_keeps_the_last_tokens(lengths, fraction):
    store = store_of(lengths)
    training, validation = split(store, fraction)
    total, held = sum(lengths), int(sum(lengths) * fraction)
    seen = [[part.read(number, 0, int(length)).tolist() for number, length in enumerate(part.lengths)] for part in (training, validation)]
    flat = [[token for tokens in part for token in tokens] for part in seen]
    assert flat[0] == list(range(total - held)) and flat[1] == list(range(total - held, total))
    borders = {0, *np.cumsum(lengths).tolist(), total - held}
    for part in seen:
        assert all(tokens and tokens[0] in borders and tokens[-1] + 1 in borders for tokens in part)
    for part in (training, validation):
        assert part.counts.read == part.counts.kept == len(part.lengths)
    cut = (total - held) not in np.cumsum([0, *lengths])
    assert len(training.lengths) + len(validation.lengths) == len(lengths) + cut
    for part in (training, validation):
        with pytest.raises(IndexError):
            part.read(len(part.lengths), 0, 1)
    if len(training.lengths):
        with pytest.raises(IndexError):  # the rest of a document that is cut belongs to validation
            training.read(len(training.lengths) - 1, 0, int(training.lengths[-1]) + 1)


def test_no_target_goes_over_the_border_of_the_split():
    training, validation = split(store_of([40, 60]), 0.25)
    both = [all_rows(make_dataset([(part, 1.0)], CONFIG, 0, shuffle=False)) for part in (training, validation)]
    assert trained(both[0]) == pairs_within([range(40), range(40, 75)])
    assert trained(both[1]) == pairs_within([range(75, 100)])


def test_validation_is_every_source_in_order():
    stores = [(store_of([30, 5], "a"), 1.0), (store_of([20], "b", 100), 1.0)]
    dataset = make_dataset(stores, replace(CONFIG, max_rows=1), 0, shuffle=False)  # max_rows is of training
    assert dataset.rows_per_epoch == 5
    assert dataset.origin(np.arange(5)) == [("a", 0, 0), ("a", 0, 1), ("a", 0, 2), ("b", 0, 0), ("b", 0, 1)]
    assert trained(all_rows(dataset)) == pairs_within([range(30), range(30, 35), range(100, 120)])
    assert [source.weight for source in dataset.report.sources] == [0.6, 0.4]


def test_one_validation_source_may_have_no_row():
    stores = [(store_of([1], "a"), 1.0), (store_of([20], "b"), 1.0)]
    dataset = make_dataset(stores, CONFIG, 0, shuffle=False)
    assert [(source.rows, source.weight, source.steps_per_epoch) for source in dataset.report.sources] == [(0, 0, 0), (2, 1, 0.5)]
    assert trained(all_rows(dataset)) == pairs_within([range(20)])
    with pytest.raises(DataError, match=r"data\.train: a gives no row"):
        make_dataset(stores, CONFIG, 0, shuffle=True)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEG_CACHE", str(tmp_path / "cache"))
    texts = {"a.jsonl": ["first text", "second one", "x" * 40], "b.txt": ["another file"], "one.txt": ["y"]}
    for name, documents in texts.items():
        lines = [json.dumps({"text": text}) for text in documents] if name.endswith("jsonl") else documents
        (tmp_path / name).write_text("\n".join(lines))
    return {name: str(tmp_path / name) for name in texts}


def test_open_data_reads_files(files):
    config = replace(CONFIG, train={files["a.jsonl"]: 2, files["b.txt"]: 1}, validation=files["b.txt"])
    training, validation = open_data(config, 0)
    assert validation is not None and bytes(validation.rows(np.array([0])).inputs[0, :11].astype(np.uint8)) == b"another fil"
    assert [source.name for source in training.report.sources] == ["a.jsonl", "b.txt"]
    assert training.vocab_size == 256 and training.report.sources[0].tokens == 60
    assert open_data(replace(config, validation=None, validation_fraction=0.0), 0)[1] is None
    part, held = open_data(replace(config, train=files["a.jsonl"], validation=None, validation_fraction=0.5), 0)
    assert held is not None and part.report.sources[0].tokens == held.report.sources[0].tokens == 30
    assert (part.report.sources[0].read, held.report.sources[0].read) == (3, 1)  # the third text is cut


def test_the_shipped_text_keeps_its_rows():
    training, validation = open_data(replace(CONFIG, seq_len=128, validation_fraction=0.05), 0)
    tokens = 1_041_710
    assert validation is not None and not training.has_segments and not validation.has_segments
    assert validation.report.sources[0].tokens == int(tokens * 0.05)
    assert training.rows_per_epoch == -(-(tokens - int(tokens * 0.05) - 1) // 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"b.txt": 1, "one.txt": 1}}, "data.train: one.txt gives no row of data.seq_len=12: 1 documents read, "
                                                "1 dropped (shorter than 2 tokens): give more text"),
        ({"train": "a.jsonl", "packing": "fit", "long_documents": "drop", "seq_len": 4}, "3 dropped (longer than data.seq_len=4): "
                                                                                          "use data.long_documents=split"),
        ({"train": "b.txt", "validation_fraction": 0.1}, "data.validation_fraction=0.1 of b.txt gives no row of data.seq_len=12: 1 "
                                                         "documents read, 1 dropped (shorter than 2 tokens): use a larger fraction, 0 for"),
        ({"train": "b.txt", "validation": "one.txt"}, "data.validation: one.txt gives no row"),
        ({"train": "b.txt", "validation": {"a.jsonl": 2}}, "data.validation: the weight 2 of a.jsonl has no effect, as all validation rows "
                                                           "are read: use 1"),
        ({"train": {"a.jsonl": 1, "b.txt": 1e-9}}, "data.train: the weight 1e-09 is too small beside a sum of 1: use at least 0.0001"),
    ],
)
def test_too_little_data_is_one_line(files, changes, message):
    def full(paths):
        return {files[name]: weight for name, weight in paths.items()} if isinstance(paths, dict) else files[paths]

    paths = {key: full(value) for key, value in changes.items() if key in ("train", "validation")}
    with pytest.raises(DataError) as error:
        open_data(replace(CONFIG, **{"validation_fraction": 0.0} | changes | paths), 0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_report_is_a_table_and_plain_values():
    lengths = [30] * 82 + [10] * 18
    stores = [(store_of(lengths, "wiki.jsonl"), 3.0), (store_of([12] * 5, "b[red].txt"), 1.0)]
    report = make_dataset(stores, replace(CONFIG, packing="fit", long_documents="drop"), 0, shuffle=True).report
    console = Console(file=StringIO(), width=80)
    print_reports(console, report)
    text = console.file.getvalue()
    lines = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()}
    assert "training: wiki.jsonl" in text and "training: b[red].txt" in text
    assert lines["documents read"] == ["100", "5"] and lines["kept"] == ["18", "5"]
    assert lines["dropped: longer than data.seq_len=12"] == ["82", "0"]
    assert lines["tokens trained"] == ["162", "55"] and lines["padding"] == ["16.7%", "0.0%"]
    assert lines["steps an epoch"] == ["6.0", "5.0"] and "truncated" not in text
    assert json.loads(json.dumps(report.as_dict()))["sources"][0]["dropped"] == {"longer than data.seq_len=12": 82}
