"""The numbers of flash-linear-attention: model, loss, packing, decoding and operator (golden vectors, float32)."""

import itertools

import pytest
import torch
from budget import DEVICE
from golden_fox import check, load_cases, weights

import hf_longctx.fox as fox


BACKENDS = ("eager", "sdpa")


def positions(cu_seqlens):
    """Position ids (1, T) of documents packed between the borders `cu_seqlens`."""
    return torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])[None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_loss(golden, backend):
    for case, t in load_cases(golden / "fox_fla", "forward"):
        model = fox.from_fla(weights(t), case["config"])
        model.set_attn_implementation(backend)
        options = {"attention_mask": t.get("inputs/attention_mask"), "use_cache": False}
        if "inputs/cu_seqlens" in t:
            options["position_ids"] = positions(t["inputs/cu_seqlens"])
        out = model(t["inputs/input_ids"], labels=t.get("inputs/labels"), **options)
        assert check(case, t, "expected/logits", out.logits), case["name"]
        if out.loss is not None:
            assert check(case, t, "expected/loss", out.loss), case["name"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(golden, backend):
    for case, t in load_cases(golden / "fox_fla", "decode"):
        model = fox.from_fla(weights(t), case["config"])
        model.set_attn_implementation(backend)
        ids, mask = t["inputs/input_ids"], t["inputs/attention_mask"]
        prefill, total = case["call"]["prefill_length"], ids.shape[1]
        cache, logits = None, []
        borders = [0, *range(prefill, total + 1)]
        for begin, end in itertools.pairwise(borders):
            out = model(ids[:, begin:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        logits = torch.cat(logits, dim=1)
        assert check(case, t, "expected/prefill_logits", logits[:, :prefill])
        assert check(case, t, "expected/step_logits", logits[:, prefill:])


def test_both_layouts_of_one_model_are_one_model(golden):
    twins = 0
    for case, t in load_cases(golden / "fox_fla", "forward"):
        if "official_config" in case:
            a = fox.from_fla(weights(t), case["config"])
            b = fox.from_official(weights(t, "weights_official/"), case["official_config"])
            theirs, _ = fox.to_official(a)
            for name, tensor in weights(t, "weights_official/").items():
                assert torch.equal(theirs[name], tensor), name
            assert all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())
            twins += 1
    assert twins == 2


@pytest.mark.parametrize("backend", ["folded", "reference"])
def test_operator(golden, backend):
    names = ("q", "k", "v", "log_fgate")
    for case, t in load_cases(golden / "fox_fla", "op"):
        leaves = [t[f"inputs/{name}"].requires_grad_() for name in names]  # (B, T, H, ...)
        options = {"scale": case["call"]["scale"], "window": case["call"]["window_size"], "backend": backend}
        if "inputs/cu_seqlens" in t:
            options["cu_seqlens"] = t["inputs/cu_seqlens"].to(DEVICE)
        out = (
            fox.forgetting_attention(*(x.transpose(1, 2).to(DEVICE) for x in leaves), **options).transpose(1, 2).cpu()
        )
        assert check(case, t, "expected/out", out), case["name"]
        out.backward(t["inputs/dout"])
        for name, x in zip(names, leaves):
            assert check(case, t, f"expected/d{name}", x.grad), (case["name"], name)
