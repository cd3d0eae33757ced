"""ssa_dropin.ssa_replace: what it refuses, because it would be lost, and what it keeps."""

import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.prune

from ssa_dropin import SSAMultiheadAttention, ssa_replace
from test_dropin import E, H, L, N, close, encoder, randn


def test_replacing_names_subclasses_and_keeps_what_is_shared():
    class Own(nn.MultiheadAttention):
        pass

    with pytest.raises(ValueError, match="Own is a subclass"):
        ssa_replace(nn.ModuleList([nn.MultiheadAttention(8, 2), Own(8, 2)]))
    shared = nn.MultiheadAttention(8, 2)
    both = ssa_replace(nn.ModuleList([shared, shared]))
    assert both[0] is both[1] and type(both[0]) is SSAMultiheadAttention


def test_replacing_refuses_to_lose_anything():
    def prune_in(m):
        nn.utils.prune.l1_unstructured(m, "in_proj_weight", 0.5)

    def weight_norm_in(m):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch would rather have the new weight_norm
            nn.utils.weight_norm(m, "in_proj_weight")

    for change, words in (
            (prune_in, "in_proj_weight_orig.*prune.remove"), (weight_norm_in, "in_proj_weight_g.*remove_weight_norm"),
            (lambda m: m.register_forward_hook(print), "hooks .forward_hooks"),
            (lambda m: m.register_forward_pre_hook(print), "hooks .forward_pre_hooks"),
            (lambda m: m.register_full_backward_hook(print), "hooks .backward_hooks"),
            (lambda m: m.register_state_dict_post_hook(lambda *given: None), "hooks .state_dict_hooks"),
            (lambda m: setattr(m, "layer", 3), "attributes .*layer"),
            (lambda m: setattr(m, "forward", m.forward), "attributes .*forward"),
            (lambda m: setattr(m, "adapter", nn.Linear(E, E)), "attributes .*adapter"),
            (lambda m: m.register_buffer("seen", torch.zeros(1)), "attributes .*seen"),
            (lambda m: m.register_parameter("gate", nn.Parameter(torch.ones(1))), "parameters are not .*gate")):
        model = encoder()
        change(model.layers[1].self_attn)
        with pytest.raises(ValueError, match=f"layers.1.self_attn.* {words}"):
            ssa_replace(model)
        assert type(model.layers[0].self_attn) is nn.MultiheadAttention  # all or nothing
        with pytest.raises(ValueError, match="the nn.MultiheadAttention.* " + words):
            ssa_replace(model.layers[1].self_attn)
    model = encoder()
    prune_in(model.layers[0].self_attn)
    nn.utils.prune.remove(model.layers[0].self_attn, "in_proj_weight")
    weight = ssa_replace(model).layers[0].self_attn.in_proj_weight
    assert (weight == 0).float().mean() == 0.5


def test_a_pruned_output_projection_keeps_its_mask():
    attention, x = nn.MultiheadAttention(E, H, batch_first=True), randn(N, L, E)
    nn.utils.prune.l1_unstructured(attention.out_proj, "weight", 0.5)
    ours = ssa_replace(attention, scorer="softmax")
    close(ours(x, x, x)[0], attention(x, x, x)[0])
    ours.out_proj.weight_orig.data += 1.0  # a step of training: what is pruned stays 0
    out = ours(x, x, x)[0]
    assert (ours.out_proj.weight == 0).float().mean() == 0.5
    ours.out_proj.bias.data.zero_()
    out = ours(x, x, x)[0]
    out.sum().backward()
    assert ((ours.out_proj.weight_orig.grad != 0) == ours.out_proj.weight_mask.bool()).all()
