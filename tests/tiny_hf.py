"""Tiny random models of Hugging Face transformers with SSA, for test_hf.py and test_convert.py."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra hf)")

import ssa_dropin  # noqa: E402

ssa_dropin.ssa_register()
SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=4)
DECODERS = {"Llama": GROUPED, "GPT2": SIZES, "Qwen2": SIZES | dict(num_key_value_heads=2), "Qwen3": GROUPED, "Gemma": GROUPED,
            "Mistral": GROUPED | dict(sliding_window=4)}
ENCODERS = {"Bert": SIZES, "Roberta": SIZES | dict(max_position_embeddings=40)}


def config(family, **changes):
    return getattr(transformers, f"{family}Config")(**(DECODERS | ENCODERS)[family] | changes)


def model_of(family, attention="ssa", kind=None, **changes):
    """Weights as after training: large enough that scores reach 3 or so, and b and n differ from head to head."""
    kind = kind or {"GPT2": "LMHeadModel", "Bert": "Model", "Roberta": "Model"}.get(family, "ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)._from_config(config(family, **changes), attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if "ssa_norm" in name:
            parameter.data += torch.linspace(-0.5, 0.5, len(parameter))
        elif parameter.dim() == 2:
            parameter.data = torch.randn_like(parameter) / 3
    return model


def output(model, ids, **given):
    out = model(ids, **given)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1, want.abs().max().item()))


IDS = torch.tensor([[5, 9, 3, 30, 7, 22, 8, 14, 3, 33], [6, 4, 17, 25, 4, 39, 12, 21, 10, 11]])
T = IDS.size(1)
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[0, :3] = RIGHT[0, 7:] = 0
PADDINGS = {"whole": None, "left": LEFT, "right": RIGHT}
