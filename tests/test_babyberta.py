"""train_babyberta.py and its parts: masking, packed rows, one loss however it is shared out, and Hugging Face's RoBERTa."""

import json
import math
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

import mlm_data
import train_babyberta
from checkpoint import load_run
from conftest import command
from flags import UserError
from metrics import read_metrics
from mlm_data import IGNORE, Sentences, masked_batch
from model import MODEL_PRESETS, ModelConfig, Transformer
from test_distributed import Run

SCRIPT = "train_babyberta.py"
TINY = ["--data=sentences.txt", "--tokenizer=tokenizer.json", "--n-layer=2", "--n-head=2", "--n-embd=16", "--context=32",
        "--batch-size=12", "--steps=6", "--warmup=2", "--save-every=2", "--eval-every=3", "--dtype=float32", "--threads=1"]
WORDS = ("you the it what do that to is a I there look at see want put on in your mommy dog cat ball book go where can "
         "we this he play with big red").split()


def speech(count, seed=0):
    """Sentences of 1 to 20 words."""
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(min(20, 1 + int(rng.expovariate(0.2))))) + " ." for _ in range(count)]


@pytest.fixture(scope="session")
def tokenizer():
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library warns of forks otherwise, and conftest.command forks
    return mlm_data.train_tokenizer(speech(300), 300)


@pytest.fixture
def nursery(tmp_path, tokenizer):
    """A folder with sentences.txt and tokenizer.json."""
    (tmp_path / "sentences.txt").write_text("\n".join(speech(400)) + "\n", encoding="utf-8")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="session")
def corpus(tokenizer):
    return Sentences(speech(400), tokenizer, longest=32)


def tiny(scorer="ssa", seed=0, **changes):
    """A small encoder, every parameter random, in float64."""
    shape = MODEL_PRESETS["babyberta"] | dict(n_layer=2, n_head=2, n_kv_head=2, n_embd=16, n_ff=64, context=32) | changes
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**shape, vocab_size=300, scorer=scorer)).double()
    for name, parameter in model.named_parameters():
        if "raw" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def train(folder, *flags, **more):
    return command(SCRIPT, *TINY, *flags, cwd=folder, **more)


def losses(run):
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


# ---------------------------------------------------------------------------------------------------------------- masking

def test_what_is_masked(corpus):
    tokens = {"inner": 0, "masked": 0, "mask": 0, "same": 0}
    replaced = []
    for step in range(40):
        batch = masked_batch(corpus, 3, step, 256)
        ends = np.zeros(len(batch.inputs), dtype=bool)
        ends[batch.starts] = ends[batch.starts + batch.lengths - 1] = True
        masked = batch.targets != IGNORE
        assert not (masked & ends).any() and batch.n_masked == masked.sum()
        assert np.add.reduceat(masked, batch.starts).min() >= 1  # no sentence without a question
        other = masked & (batch.inputs != corpus.special["mask"])
        replaced.append(batch.inputs[other])
        tokens["inner"] += (~ends).sum()
        tokens["masked"] += masked.sum()
        tokens["mask"] += (masked & ~other).sum()
        tokens["same"] += (other & (batch.inputs == batch.targets)).sum()
    replaced = np.concatenate(replaced)
    inner = np.concatenate([n - 2 for n in [corpus.lengths]])
    # 15 % of each sentence's m tokens given at least one: 0.15 m / (1 - 0.85^m) on average.
    expected = (0.15 * inner / (1 - 0.85 ** inner)).sum() / inner.sum()
    assert tokens["masked"] / tokens["inner"] == pytest.approx(expected, rel=0.03)
    assert len(replaced) / tokens["masked"] == pytest.approx(0.1, rel=0.1)
    # A random token is any ordinary one, and the masked one itself only by chance.
    assert set(replaced) <= set(corpus.ordinary) and len(set(replaced)) > 0.9 * len(corpus.ordinary)
    assert tokens["same"] / len(replaced) < 0.02 and not set(corpus.ordinary) & set(corpus.special.values())


def test_some_may_be_left_unmasked(corpus):
    batch = masked_batch(corpus, 0, 0, 4000, leave_unmasked=0.3)
    masked = batch.targets != IGNORE
    assert (batch.inputs[masked] == batch.targets[masked]).mean() == pytest.approx(0.3, abs=0.03)
    assert (batch.inputs[masked] == corpus.special["mask"]).mean() == pytest.approx(0.6, abs=0.03)


def test_a_batch_is_a_function_of_seed_and_step_alone(corpus):
    one, again = masked_batch(corpus, 5, 7, 16), masked_batch(corpus, 5, 7, 16)
    assert np.array_equal(one.inputs, again.inputs) and np.array_equal(one.targets, again.targets)
    for other in (masked_batch(corpus, 5, 8, 16), masked_batch(corpus, 6, 7, 16)):
        assert len(other.inputs) != len(one.inputs) or not np.array_equal(other.inputs, one.inputs)


def test_a_pass_takes_every_sentence_ten_times(corpus):
    pairs = mlm_data.pair_numbers(corpus, 0, np.arange(10 * corpus.n), "shuffled")
    assert np.array_equal(np.bincount(pairs), np.full(corpus.n, 10)) and len(set(pairs[:10].tolist())) > 7
    assert not np.array_equal(pairs, mlm_data.pair_numbers(corpus, 0, 10 * corpus.n + np.arange(10 * corpus.n), "shuffled"))
    original = mlm_data.pair_numbers(corpus, 0, np.arange(10 * corpus.n + 1), "original")
    assert np.array_equal(original, [*np.repeat(np.arange(corpus.n), 10), 0])


def test_sentences_too_short_and_too_long_are_dropped_and_counted(tokenizer):
    corpus = Sentences(["see .", "look at that .", "a " * 10_000, "you see it ."], tokenizer, longest=32)
    assert (corpus.n, corpus.too_short, corpus.too_long) == (2, 1, 1)
    tokens, lengths = corpus.take(np.array([1, 0]))
    assert tokenizer.decode(tokens.tolist()) == " you see it . look at that ." and lengths.sum() == len(tokens)


def test_special_tokens_spelled_out_are_ordinary_text(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "t.json"))
    for one in (tokenizer, mlm_data.read_tokenizer(tmp_path / "t.json")):
        ids = Sentences(["see <mask> and </s> there"], one, longest=64).tokens
        assert not set(ids[1:-1]) & {one.token_to_id(token) for token in mlm_data.SPECIAL.values()}


def test_held_out_sentences_are_never_trained_on():
    train_part, held_out = mlm_data.split_held_out(speech(5000))
    assert not set(train_part) & set(held_out) and len(train_part) + len(held_out) == 5000
    assert 0.05 < len(set(held_out)) / len(set(speech(5000))) < 0.15


def test_evaluation_takes_every_sentence_once_with_masks_alone(corpus):
    batches = [list(mlm_data.evaluation_batches(corpus, 64)) for _ in range(2)]
    assert sum(len(b.lengths) for b in batches[0]) == corpus.n
    assert all(np.array_equal(a.inputs, b.inputs) for a, b in zip(*batches))
    assert all((b.inputs[b.targets != IGNORE] == corpus.special["mask"]).all() for b in batches[0])
    some = list(mlm_data.evaluation_batches(corpus, 64, most_tokens=500))
    assert 300 < sum(len(b.inputs) for b in some) < 700


def test_the_unigram_baseline_is_the_cross_entropy_of_frequencies(tokenizer):
    train_part, other = (Sentences([text], tokenizer, longest=32) for text in ("do you see the dog", "the dog you see"))
    counts = dict.fromkeys(range(tokenizer.get_vocab_size()), 1)
    for token in train_part.tokens[1:-1]:
        counts[token] += 1
    expected = [-math.log(counts[token] / sum(counts.values())) for token in other.tokens[1:-1]]
    assert mlm_data.unigram_loss(train_part, other) == pytest.approx(sum(expected) / len(expected))


def test_csv_columns_are_sentences(tmp_path):
    (tmp_path / "a.csv").write_text('text\nsee the dog .\n"a , b ""c"""\n', encoding="utf-8")
    assert mlm_data.read_sentences(tmp_path / "a.csv") == ["see the dog .", 'a , b "c"']
    (tmp_path / "b.csv").write_text("words\nsee\n", encoding="utf-8")
    with pytest.raises(UserError, match="no column `text`"):
        mlm_data.read_sentences(tmp_path / "b.csv")


# ------------------------------------------------------------------------------------------------------------ packed rows

@pytest.mark.parametrize("scorer", ["ssa", "softmax", "sparsemax", "cosformer"])
def test_sentences_that_share_a_row_do_not_see_each_other(corpus, scorer):
    model, batch = tiny(scorer), masked_batch(corpus, 0, 0, 24)
    x, y, segments = batch.packed(range(24), corpus.special["pad"])
    assert segments.max() >= 2 and (segments == 0).float().mean() < 0.2  # several a row, little left empty
    outputs, _ = model(x, segments=segments)
    for start_, length in zip(batch.starts, batch.lengths):
        alone = torch.from_numpy(batch.inputs[start_ : start_ + length])
        rows = [(r, c) for r, c in zip(*np.where(x == alone[0])) if torch.equal(x[r, c : c + length], alone)]
        expected = model(alone[None])[0][0]
        assert any((outputs[r, c : c + length] - expected).abs().max() < 1e-9 for r, c in rows)


def test_packing_places_every_token_once_and_leaves_little_empty():
    rng = np.random.default_rng(0)
    for usual in (1, 40, 100):
        for count in (1, 16, 300):
            lengths = rng.integers(3, 40, count)
            shape, (row, column), number = mlm_data.pack(lengths, 39, usual)
            cells = row * shape[1] + column
            assert len(set(cells)) == lengths.sum() and row.max() < shape[0] and column.max() < shape[1] <= 39
            assert count < 300 or usual == 1 or shape[0] * shape[1] < 1.1 * lengths.sum()
            sentence = np.repeat(np.arange(count), lengths)
            assert len(set(zip(row, number))) == count == len(set(zip(row, number, sentence)))


def test_what_fills_a_row_enters_nothing(corpus):
    model, batch = tiny(), masked_batch(corpus, 0, 1, 16)
    parts = [batch.packed(range(16), pad) for pad in (corpus.special["pad"], 17)]
    assert not torch.equal(parts[0][0], parts[1][0])
    gradients = []
    for x, y, segments in parts:
        _, loss = model(x, y, segments=segments, at_targets=True)
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*gradients):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["auto", "blockwise"])
def test_the_fast_path_is_the_scorer_that_the_plain_one_is(corpus, path):
    """Also with masks that differ by row: outputs, and gradients of all parameters, b and n among them."""
    batch = masked_batch(corpus, 0, 3, 24)
    x, y, segments = batch.packed(range(24), corpus.special["pad"])
    results = []
    for one in (path, "plain"):
        model = tiny(path=one).float()
        _, loss = model(x, y, segments=segments, at_targets=True)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append([loss, *gradients])
    for (name, _), a, b in zip([("loss", None), *model.named_parameters()], *results):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)
        assert "raw" not in name or (a.isfinite().all() and a.abs().min() > 1e-8)


def test_only_targets_are_read_out(corpus):
    model, batch = tiny(), masked_batch(corpus, 0, 2, 16)
    x, y, segments = batch.packed(range(16), corpus.special["pad"])
    every, mean = model(x, y, segments=segments)
    few, same = model(x, y, segments=segments, at_targets=True)
    assert few.shape == (batch.n_masked, 300) and torch.equal(few, every[y != IGNORE])
    assert same.item() == pytest.approx(mean.item())


# -------------------------------------------------------------------------------------------------------------- the model

def test_the_paper_preset_has_the_published_size():
    flags = train_babyberta.Flags(**train_babyberta.PRESETS["paper"])
    config = flags.model_config(8192)
    assert (config.n_layer, config.n_head, config.n_embd, config.n_ff, config.context, config.norm_eps, config.dropout) == (
        8, 8, 256, 1024, 128, 1e-5, 0.1)
    with torch.device("meta"):
        # RobertaForMaskedLM in this shape has 8,523,776: 2 rows of positions and 1 token type more, 256 wide each.
        assert Transformer(config).n_parameters() - 8 * 2 * 8 == 8_523_008 == 8_523_776 - 3 * 256


# ---------------------------------------------------------------------------------------------------------------- the job

def test_a_run_leaves_a_model_its_tokenizer_and_a_summary(nursery):
    (nursery / "other.txt").write_text("\n".join(speech(50, seed=9)).upper(), encoding="utf-8")
    done = train(nursery, "--ood=other.txt")
    out = nursery / "runs" / "train_babyberta-laptop-ssa-s0"
    assert "dropped:" in done.stdout and "under 3 words" in done.stdout and "path: " in done.stdout
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["max_change_b"] > 1e-5 and summary["max_change_n"] > 1e-5 and summary["path"] in ("blockwise", "plain")
    assert summary["val_loss"] == pytest.approx(math.log(load_run(out)[0].config.vocab_size), abs=0.5)
    assert summary["ood_loss"] > 0 and (out / "loss.png").stat().st_size > 5000
    assert mlm_data.read_tokenizer(out / "tokenizer.json").to_str() == mlm_data.read_tokenizer(nursery / "tokenizer.json").to_str()


def test_training_learns_and_attention_dropout_takes_the_plain_path(nursery):
    lines = [" ".join((WORDS * 2)[first : first + 6]) for first in range(len(WORDS)) for _ in range(9)]  # each word has its next
    (nursery / "sentences.txt").write_text("\n".join(lines), encoding="utf-8")
    done = train(nursery, "--steps=80", "--lr=0.02", "--batch-size=32", "--dropout=0.1", "--eval-every=80", "--save-every=80",
                 "--tokenizer=", "--vocab-size=300", "--out=r")
    assert "path: plain (attention dropout of 0.1 falls on the weights" in done.stdout
    steps = losses(nursery / "r")
    assert np.mean(steps[-10:]) < 0.75 * np.mean(steps[:3]) and len(set(steps)) == 80


def test_the_loss_is_the_mean_over_all_masked_tokens_however_they_are_shared_out(nursery, corpus):
    """Micro-batches and processes with unequal numbers of masked tokens: one run."""
    train(nursery, "--out=whole")
    for flags, count in ((["--micro-batch=3", "--out=parts"], 1), (["--out=two"], 2), (["--micro-batch=2", "--out=both"], 2)):
        env = {"TOKENIZERS_PARALLELISM": "false"}
        Run(*TINY, *flags, "--device=cpu", cwd=nursery, count=count, script=SCRIPT, **env).wait()
        name = flags[-1].removeprefix("--out=")
        assert losses(nursery / name) == pytest.approx(losses(nursery / "whole"), abs=1e-5)
        whole, part = (load_run(nursery / n)[0].state_dict() for n in ("whole", name))
        assert all((whole[key] - part[key]).abs().max() < 2e-5 for key in whole)
    batch = masked_batch(corpus, 0, 0, 12)
    shares = [int((batch.packed(rows, 1)[1] != IGNORE).sum()) for rows in (range(6), range(6, 12))]
    assert shares[0] != shares[1] and sum(shares) == batch.n_masked


def test_killed_and_resumed_ends_byte_for_byte_the_same(nursery):
    long = [*TINY, "--steps=60", "--save-every=10", "--eval-every=30", "--dropout=0.1"]
    command(SCRIPT, *long, "--out=whole", cwd=nursery)
    run = Run(*long, "--out=r", cwd=nursery, count=1, script=SCRIPT)
    while len(read_metrics(nursery / "r" / "metrics.jsonl")) < 25:
        time.sleep(0.002)
    os.kill(run.children[0], signal.SIGKILL)
    assert run.wait(check=False)[0] == [-signal.SIGKILL]
    (nursery / "tokenizer.json").unlink()  # the run has its own
    done = command(SCRIPT, "--out=r", "--resume", cwd=nursery)
    assert "resumed after step" in done.stdout
    assert (nursery / "r" / "model.safetensors").read_bytes() == (nursery / "whole" / "model.safetensors").read_bytes()
    assert losses(nursery / "r") == losses(nursery / "whole")


def test_the_learning_rate_is_a_line_up_and_a_line_down():
    flags = train_babyberta.Flags(lr=1.0, min_lr=0.0, warmup=10, steps=110)
    rates = [train_babyberta.learning_rate(step, flags, 1010) for step in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1) and rates[60] == pytest.approx(0.5) and rates[110] == 0
    flags.decay = "pass"
    assert train_babyberta.learning_rate(110, flags, 1010) == pytest.approx(0.9)
    assert train_babyberta.learning_rate(1010, flags, 1010) == 0


def test_real_speech_has_the_published_shape():
    data = os.environ.get("SSA_DATA_DIR")
    if not data:
        pytest.skip("SSA_DATA_DIR is not set: no child-directed speech")
    tokenizer = mlm_data.read_tokenizer(f"{data}/babyberta/tokenizer.json")
    texts = mlm_data.read_sentences(f"{data}/aochildes/aochildes_subset.txt")
    assert len(texts) == 236_869 and tokenizer.get_vocab_size() == 8192
    corpus = Sentences(texts[:5000], tokenizer, longest=128)
    assert corpus.special == dict(mask=0, pad=1, unk=2, start=3, end=4) and corpus.too_long == 0
    batch = masked_batch(corpus, 0, 0, 64)
    x, _, segments = batch.packed(range(64), 1)
    padded = 64 * batch.lengths.max()
    assert (segments > 0).sum() == batch.lengths.sum() and x.numel() < 1.1 * batch.lengths.sum() < 0.7 * padded
