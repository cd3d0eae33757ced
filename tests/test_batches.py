"""Batches and evaluation: windows that are a pure function of the step, and the baselines beside them."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import data
from test_data import corpus, raises_line, some, texts, write_jsonl  # noqa: F401  (corpus: a fixture)


# ---- Batches


@some
@given(st.integers(1, 5000), st.integers())
@example(1, 0)
@example(4097, 1)
def test_permute_is_a_permutation(n, seed):
    assert sorted(data.permute(np.arange(n), n, str(seed)).tolist()) == list(range(n))


def test_permute_is_the_same_for_ever_and_reaches_far():
    assert data.permute(np.arange(10), 10, "key").tolist() == [3, 4, 6, 8, 9, 1, 7, 5, 2, 0]
    for n in (2**31 - 1, 2**31 + 1, 2**40):
        index = np.array([0, 1, n // 2, n - 1])
        there = data.permute(index, n, "key")
        assert len(set(there.tolist())) == 4 and 0 <= there.min() <= there.max() < n
        assert data.permute(index[2:3], n, "key") == there[2]  # one element needs no other


def test_every_order_of_four_is_about_as_frequent():
    counts = Counter(tuple(data.permute(np.arange(4), 4, str(key)).tolist()) for key in range(2400))
    assert len(counts) == 24 and 60 < min(counts.values()) and max(counts.values()) < 145


def all_starts(corpus, seed, epoch, context, batch_size=7):
    """Where each window of an epoch begins: its tokens are looked up in the text, whose every place is different."""
    train = corpus.tokens("train", 0, corpus.n_tokens("train"))
    place = {train[i : i + context + 1].tobytes(): i for i in range(len(train) - context)}
    assert len(place) == len(train) - context
    n = (len(train) - 1 - (context - 1)) // context
    rows = range(epoch * n, (epoch + 1) * n)
    found = []
    for g in rows:
        x, y = corpus.batch(seed, g // batch_size, [g % batch_size], batch_size, context)
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (1, context)
        found.append(place[np.append(x[0].numpy(), y[0, -1].numpy()).tobytes()])
        assert torch.equal(x[0, 1:], y[0, :-1])
    return found, n, len(train)


def test_every_epoch_has_each_window_once_in_another_order_from_another_place(corpus):
    context, orders, shifts = 24, set(), set()
    for seed, epoch in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1)):
        starts, n, length = all_starts(corpus, seed, epoch, context)
        shift = min(starts)
        assert sorted(starts) == [shift + context * i for i in range(n)] and 0 <= shift < context
        assert max(starts) + context < length
        assert starts != sorted(starts)
        orders.add(tuple((start - shift) // context for start in starts))
        shifts.add(shift)
    assert len(orders) == 5 and len(shifts) > 2


@some
@given(st.integers(0, 9), st.integers(0, 60), st.lists(st.integers(0, 31), min_size=1, max_size=8))
def test_any_rows_equal_those_of_the_whole_batch(seed, step, rows):
    corpus = SHARED["corpus"]
    whole = corpus.batch(seed, step, range(32), 32, 48)  # 32 rows of about 190 windows: epochs meet in a batch
    part = corpus.batch(seed, step, rows, 32, 48)
    assert torch.equal(whole[0][rows], part[0]) and torch.equal(whole[1][rows], part[1])


SHARED = {}


@pytest.fixture(scope="module", autouse=True)
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    source = write_jsonl(folder / "docs.jsonl", [{"text": text} for text in texts(200)])
    SHARED.update(folder=folder, corpus=data.prepare(source, "bytes", folder / "many", shard_tokens=300),
                  one_file=data.prepare(source, "bytes", folder / "one"))


def test_the_number_of_files_changes_nothing():
    many, one = SHARED["corpus"], SHARED["one_file"]
    assert len(many.manifest["splits"]["train"]["shards"]) > 20 and len(one.manifest["splits"]["train"]["shards"]) == 1
    n = one.n_tokens("train")
    whole = one.tokens("train", 0, n)
    assert many.n_tokens("train") == n and np.array_equal(many.tokens("train", 0, n), whole)
    ends = np.cumsum([shard["tokens"] for shard in many.manifest["splits"]["train"]["shards"]]).tolist()
    for start in (0, ends[0] - 1, ends[0], ends[3] - 40, ends[-2]):
        for stop in (start + 1, ends[0], ends[0] + 1, ends[4], n):
            if stop > start:
                assert np.array_equal(many.tokens("train", start, stop), whole[start:stop])
    for a, b in zip(many.batch(3, 5, range(16), 16, 700), one.batch(3, 5, range(16), 16, 700)):
        assert torch.equal(a, b)


def test_the_shortest_text_still_gives_windows():
    corpus = SHARED["one_file"]
    n = corpus.n_tokens("train")
    whole = corpus.tokens("train", 0, n)
    for context in (n - 1, n - 2, n // 2, 1):
        x, y = corpus.batch(0, 0, [0, 1], 2, context)
        assert x.shape == (2, context)
    assert np.array_equal(corpus.batch(0, 0, [0], 1, n - 1)[1][0], whole[1:])
    assert sorted(corpus.batch(0, 0, range(n - 1), n - 1, 1)[0].flatten().tolist()) == sorted(whole[:-1].tolist())
    with raises_line("docs-jsonl", f"{n} training tokens", f"--context={n}"):
        corpus.batch(0, 0, [0], 1, n)


# ---- Evaluation


@some
@given(st.integers(1, 400), st.integers(1, 9))
def test_the_whole_split_predicts_every_token_but_the_first_once(context, batch_size):
    corpus = SHARED["corpus"]
    val = corpus.tokens("val", 0, corpus.n_tokens("val"))
    batches = list(corpus.eval_batches("val", context, batch_size))
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == val[1:].tolist()
    assert torch.cat([x.flatten() for x, _ in batches]).tolist() == val[:-1].tolist()
    assert all(x.dtype == torch.int64 and len(x) <= batch_size and x.shape == y.shape for x, y in batches)
    assert all(x.shape[1] == context for x, _ in batches[:-1])


def test_fewer_tokens_are_whole_windows_evenly_spread():
    corpus, context = SHARED["corpus"], 10
    whole = torch.cat([x for x, _ in corpus.eval_batches("train", context, 1000) if x.shape[1] == context])
    part = torch.cat([x for x, _ in corpus.eval_batches("train", context, 7, max_tokens=205)])
    assert part.shape == (20, context)
    places = [next(i for i, row in enumerate(whole) if torch.equal(row, wanted)) for wanted in part]
    gaps = np.diff(places)
    assert places[0] == 0 and max(gaps) - min(gaps) <= 1 and places[-1] + max(gaps) >= len(whole) - 1
    assert [x.shape for x, _ in corpus.eval_batches("val", context, 4, max_tokens=3)] == [(1, context)]
    assert sum(x.numel() for x, _ in corpus.eval_batches("val", context, 4, 10**9)) == corpus.n_tokens("val") - 1


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_unigram_baseline_equals_a_plain_count(split):
    corpus = SHARED["corpus"]
    train, target = ([int(i) for i in corpus.tokens(name, 0, corpus.n_tokens(name))] for name in ("train", split))
    count = Counter(train)
    nats = sum(-math.log((count[i] + 1) / (len(train) + 257)) for i in target[1:])
    n_bytes = sum(i != 256 for i in target[1:])
    assert corpus.unigram_bits_per_byte(split) == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-12)


def test_bits_per_byte():
    assert data.bits_per_byte(256 * math.log(256), 256) == pytest.approx(8)
    with raises_line("bits per byte", "no text"):
        data.bits_per_byte(1.0, 0)
