"""In-context tasks and their tests under shift, in parts: sequences and baselines against references, models with a known
fault that the tests must tell apart, and the look into attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import icl_attention
import icl_shift
import icl_tasks
from config import ModelConfig
from flags import SharedFlags
from icl_tasks import generator
from model import Transformer


def tiny_model(**options):
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=2, n_kv_head=2, n_embd=16, n_ff=32, context=32, n_in=1, n_out=1, positions="learned",
                 activation="gelu", norm_offset=False, bias=True)
    return Transformer(ModelConfig(**shape | options)).eval()


# -------------------------------------------------------------------------------------------------------------- sequences

@pytest.mark.parametrize("law", icl_tasks.LAWS)
@pytest.mark.parametrize("task, rule", [("every", all), ("some", any)])
def test_answers_are_what_the_words_say(task, rule, law):
    x, y = icl_tasks.draw(task, law, 200, 9, generator(0, icl_tasks.TEST))
    assert x.dtype == y.dtype == np.float32
    assert y.tolist() == [[1.0 if rule(v > 0 for v in row[:i + 1]) else -1.0 for i in range(9)] for row in x]


def test_mixed_sequences_are_one_or_the_other_and_linear_ones_lie_on_a_line():
    x, y = icl_tasks.draw("mixed", "balanced", 400, 9, generator(0, icl_tasks.TEST))
    both = [[[1.0 if rule(v > 0 for v in row[:i + 1]) else -1.0 for i in range(9)] for row in x] for rule in (all, any)]
    fits = np.array([[answers == row.tolist() for answers, row in zip(kind, y)] for kind in both])
    assert fits.any(0).all() and (fits.sum(1) > 150).all()
    x, y = icl_tasks.draw("linear", "balanced", 4000, 9, generator(0, icl_tasks.TEST), sigma_x=3, sigma_f=2)
    slope = (y[:, 1] - y[:, 0]) / (x[:, 1] - x[:, 0])
    np.testing.assert_allclose(slope[:, None] * (x - x[:, :1]), y - y[:, :1], atol=0.02, rtol=0.02)
    assert x.std() == pytest.approx(3, rel=0.03) and y.var() == pytest.approx(2**2 * (3**2 + 1), rel=0.1)


def test_the_balanced_law_is_the_one_that_the_docstring_states():
    T, n = 7, 40000
    x, y = icl_tasks.draw("every", "balanced", n, T, generator(0, icl_tasks.TEST))
    decides = x < 0
    first = np.where(decides.any(1), decides.argmax(1), T)
    np.testing.assert_allclose(np.bincount(first, minlength=T + 1) / n, 1 / (T + 1), atol=0.01)
    later = decides[first == 0, 1:].sum(1)  # a share uniform in (0, 1) makes every number of later deciders equally likely
    np.testing.assert_allclose(np.bincount(later, minlength=T) / len(later), 1 / T, atol=0.02)
    assert np.abs(x).mean() == pytest.approx((2 / np.pi) ** 0.5, rel=0.02)
    assert abs((y > 0).mean() - 0.5) < 0.1  # no constant answer is much better than a coin
    iid = icl_tasks.draw("every", "iid", n, T, generator(0, icl_tasks.TEST))[0]
    assert abs(iid.mean()) < 0.01 and iid.std() == pytest.approx(1, rel=0.01) and abs((iid < 0).mean() - 0.5) < 0.01


def test_a_batch_is_a_function_of_seed_and_step_and_meets_no_test_set():
    whole = icl_tasks.batch("every", "balanced", 3, 5, range(8), 8, 6)
    part = icl_tasks.batch("every", "balanced", 3, 5, [6, 2], 8, 6)
    assert np.array_equal(part[0], whole[0][[6, 2]]) and np.array_equal(part[1], whole[1][[6, 2]])
    others = [icl_tasks.batch("every", "balanced", seed, step, range(8), 8, 6)[0] for seed, step in ((4, 5), (3, 6))]
    others += [icl_tasks.draw("every", "balanced", 8, 6, generator(3, stream, 5))[0]
               for stream in (icl_tasks.VAL, icl_tasks.TEST)]
    assert not any(np.isin(np.abs(other), np.abs(whole[0])).any() for other in others)


def test_tokens_interleave_and_an_answer_is_read_before_it_is_shown():
    x, y = np.array([[1.0, 2.0, 3.0]], np.float32), np.array([[-1.0, 1.0, -1.0]], np.float32)
    assert icl_tasks.tokens(x, y, "running")[..., 0].tolist() == [[1, -1, 2, 1, 3]]
    assert icl_tasks.tokens(x, y, "final")[..., 0].tolist() == [[1, 2, 3]]
    for labels in icl_tasks.LABELS:
        tokens = icl_tasks.tokens(x, y, labels)
        assert tokens.shape[1] == icl_tasks.n_tokens(3, labels)
        assert icl_tasks.at_x(tokens, labels).tolist() == x.tolist()
    model, changed = tiny_model(), y.copy()
    changed[0, 1] = 7.0
    before, after = (icl_shift.answer(model, x, answers, "running") for answers in (y, changed))
    assert np.array_equal(before[:, :2], after[:, :2]) and before[0, 2] != after[0, 2]
    assert np.array_equal(icl_shift.answer(model, x, y, "final"), icl_shift.answer(model, x, changed, "final"))


def test_baselines_against_their_definitions():
    x, y = icl_tasks.draw("linear", "iid", 20, 7, generator(0, icl_tasks.TEST))
    y += generator(1, icl_tasks.TEST).standard_normal(y.shape).astype(np.float32)  # noise: the fit is no interpolation
    found = {name: predict(x, y) for name, predict in icl_tasks.LINEAR_BASELINES.items()}
    assert not found["zero"].any() and all(predictions[:, 0].tolist() == [0.0] * 20 for predictions in found.values())
    for row in range(20):
        for i in range(1, 7):
            past, answers = np.stack([x[row, :i], np.ones(i)], 1).astype(float), y[row, :i].astype(float)
            here = np.array([x[row, i], 1.0])
            line = np.linalg.lstsq(past, answers, rcond=None)[0]
            assert found["least squares"][row, i] == pytest.approx(here @ line, rel=1e-6, abs=1e-6)
            assert found["averaging"][row, i] == pytest.approx(here @ (past * answers[:, None]).mean(0), rel=1e-6, abs=1e-6)
            nearest = sorted(range(i), key=lambda j: abs(x[row, j] - x[row, i]))[:3]
            assert found["3 nearest"][row, i] == pytest.approx(answers[nearest].mean(), rel=1e-6, abs=1e-6)
    assert icl_tasks.copy_last(np.array([[-1.0, 1.0, 1.0]])).tolist() == [[1.0, -1.0, 1.0]]


# ------------------------------------------------------------------------------- tests that tell one failure from another

class Oracle(torch.nn.Module):
    """Answers `every` exactly, from x alone, but for one fault around an outlier (|x| > 50)."""

    def __init__(self, fault, labels):
        super().__init__()
        self.fault, self.labels, self.calls = fault, labels, torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        x = icl_tasks.at_x(tokens, self.labels)
        outlier, decided = x.abs() > 50, (x < 0).cumsum(1) > 0
        if self.fault == "own":  # blind at its own place only
            decided = torch.where(outlier, False, decided)
        if self.fault == "after":  # behind an outlier it sees nothing but the outlier
            seen = outlier.cumsum(1) - outlier.long() > 0
            decided = torch.where(seen, (outlier & (x < 0)).cumsum(1) > 0, decided)
        if self.fault == "missed":  # it never notices the outlier itself
            decided = ((x < 0) & ~outlier).cumsum(1) > 0
        out = torch.where(decided, -1.0, 1.0)
        return (out if self.labels == "final" else out.repeat_interleave(2, 1)[:, :-1])[..., None], None


@pytest.mark.parametrize("labels", icl_tasks.LABELS)
@pytest.mark.parametrize("fault, expected", [("none", (0, 0, 0, 0)), ("own", (0.5, 0.5, 0, 0)), ("after", (0, 0, 0.5, 0)),
                                             ("missed", (0, 0.5, 0, 1))])
def test_the_outlier_test_tells_where_a_model_fails(labels, fault, expected):
    flags = SimpleNamespace(task="every", asked=labels, points=9, test_sequences=40)
    found = icl_shift.outlier(Oracle(fault, labels), flags)
    assert found["magnitudes"][2:] == (1e2, 1e3, 1e4, 1e5, 1e6) and found["place"] == 5
    for part, value in zip(("own", "sign", "after", "missed"), expected):
        assert found["summary"][part][2:] == [value] * 5 and found["summary"][part][0] == 0
    assert not any(found["summary"]["before"])


@pytest.mark.parametrize("task", ["every", "some"])
@pytest.mark.parametrize("labels", icl_tasks.LABELS)
def test_in_the_length_test_no_answer_without_thought_beats_a_coin(task, labels):
    flags = SimpleNamespace(task=task, asked=labels, points=6, test_sequences=40, context=60, reached=lambda: 24)
    cells = icl_shift.lengths(tiny_model(context=60), flags)
    assert len(cells) == 63
    for cell in cells:
        tokens = icl_tasks.n_tokens(cell["length"], labels)
        assert cell["trained"] == (tokens <= 24) and (cell["error"] is None) == (tokens > 60)
        if cell["error"] is not None:
            assert cell["constant_true"] == cell["constant_false"] == 0.5
            assert cell["copy_last"] == (0.5 if labels == "running" else None)
    for sigma in (1, 30):  # a model that has understood is right everywhere
        decides = icl_shift.balanced_at_last(labels, 40, 20, generator(0, icl_tasks.TEST))
        x, y = icl_tasks.quantifier(decides, icl_tasks.magnitudes(generator(1, icl_tasks.TEST), decides.shape, sigma))
        assert not icl_shift.errors("every", icl_shift.answer(Oracle("none", labels), x, y, labels), y).any()


def test_deciders_by_number_and_place():
    flags = SimpleNamespace(task="every", asked="final", points=8, test_sequences=20)
    exact, blind = (icl_shift.deciders(model, flags) for model in (Oracle("none", "final"), lambda_model(1.0)))
    assert not any(cell["error"] for cell in exact["by_number"]) and not any(c["own"] or c["last"] for c in exact["by_place"])
    assert [(cell["number"], cell["error"]) for cell in blind["by_number"]] == [(0, 0), (1, 1), (2, 1), (4, 1), (8, 1)]
    assert [(c["place"], c["own"], c["last"]) for c in blind["by_place"]] == [(d, 1, 1) for d in range(1, 9)]


def lambda_model(value):
    """A model that answers with one number always."""
    model = tiny_model()
    torch.nn.init.zeros_(model.read_out.weight)
    torch.nn.init.constant_(model.read_out.bias, value)
    return model


def test_linear_errors_of_the_answer_zero_are_the_variance():
    flags = SimpleNamespace(task="linear", asked="running", points=6, test_sequences=2000, context=32, reached=lambda: 11)
    found = icl_shift.functions(lambda_model(0.0), flags)
    assert found["trained"] == [True] * 6 + [False] * 6
    for cell in found["cells"]:
        assert cell["model"] == cell["zero"] == pytest.approx(cell["variance"], rel=0.2)
        assert cell["least squares"] < 1e-6 * cell["variance"] < cell["3 nearest"] < cell["zero"]


# -------------------------------------------------------------------------------------------------- looking at attention

@pytest.mark.parametrize("scorer", SharedFlags.__annotations__["scorer"].__args__)
def test_a_watched_model_is_the_model_and_its_weights_are_attention(scorer):
    model, x = tiny_model(scorer=scorer), torch.randn(3, 12, 1)
    copy = icl_attention.watched(model)
    torch.testing.assert_close(copy(x)[0], model(x)[0])
    weights = icl_attention.weights(copy)
    assert weights.shape == (2, 3, 2, 12, 12) and not weights.triu(1).any() and (weights.sum(-1) < 1 + 1e-5).all()
    factor = icl_attention.watched(model, 3.0)
    for block in model.blocks:
        block.attn.qkv.weight.data[:16] *= 3.0  # the queries
    torch.testing.assert_close(factor(x)[0], model(x)[0])
    if scorer not in ("hardmax", "cosformer"):  # those two see no difference
        assert not torch.allclose(factor(x)[0], copy(x)[0])


def test_interventions_change_one_thing_and_leave_the_model():
    model, x = tiny_model(scorer="softmax"), 10 * torch.randn(3, 12, 1)
    before = model(x)[0]
    changed = dict(icl_shift.interventions(model))
    assert list(changed) == ["input clipped at 4", "scores x 0.5", "scores x 0.1", "scorer swapped for ssa"]
    torch.testing.assert_close(changed["input clipped at 4"](x)[0], model(x.clamp(-4, 4))[0])
    other = tiny_model(scorer="ssa")
    other.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(changed["scorer swapped for ssa"](x)[0], other(x)[0])
    assert all(not torch.allclose(one(x)[0], before, rtol=1e-6, atol=1e-7) for one in changed.values())
    assert torch.equal(model(x)[0], before)


def test_concentration_of_known_weights():
    weights = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.1, 0, 0]])
    found = icl_attention.concentration(weights)
    torch.testing.assert_close(found["effective"], torch.tensor([4.0, 1.0, 2.0, 4 / 3**0.75]))
    torch.testing.assert_close(found["largest"], torch.tensor([0.25, 1.0, 0.5, 0.75]))


def test_models_without_feed_forward_or_norms_and_shifted_positions():
    names = [name for name, _ in tiny_model(n_ff=0, norm="none").named_parameters()]
    assert not any(".ff." in name or "norm" in name for name in names)
    model, x = tiny_model(n_ff=0, norm="none"), torch.randn(2, 5, 1)
    x0 = model.read_in(x) + model.position.weight[:5]
    for block in model.blocks:  # nothing but attention added up
        x0 = x0 + block.attn(x0, None, None, None)[0]
    torch.testing.assert_close(model(x)[0], model.read_out(x0))
    model = tiny_model()
    shifted = model(x, first_position=7)[0]
    model.position.weight.data[:5] = model.position.weight.data[7:12].clone()
    torch.testing.assert_close(model(x)[0], shifted)
    with pytest.raises(ValueError, match="33 tokens are more than the model's context of 32"):
        model(torch.zeros(1, 5, 1), first_position=28)
