"""scripts.bench.gpu.check names wrong implementations and times the others, in a dry run on a CPU."""

import json

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_longctx.fox import backend_fox


pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # from numpy in the interpreter
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are for machines without a GPU"),
]


class WrongGradient(torch.autograd.Function):
    """Like FlashAttention-4 at widths that are not a multiple of 32: the last columns of dq are wrong."""

    @staticmethod
    def forward(ctx, q):
        return q.clone()

    @staticmethod
    def backward(ctx, dq):
        return torch.cat([dq[..., :12], dq[..., 12:].roll(1, 2)], -1)


def wrong_gradient(module, query, *args, **kwargs):
    return sdpa_attention_forward(module, WrongGradient.apply(query), *args, **kwargs)


def without_gate(module, query, key, value, *args, **kwargs):
    query, key = (x[..., : module.head_dim] for x in (query, key))
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def no_kernel(*args, **kwargs):
    raise RuntimeError("no kernel for this GPU")


WRONG = {"wrong_gradient": wrong_gradient, "without_gate": without_gate, "no_kernel": no_kernel}


@pytest.fixture
def check(load_script, monkeypatch):
    check = load_script("bench.gpu.check")
    for name, function in WRONG.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    monkeypatch.setattr(backend_fox, "ATTENTION_BACKENDS", (*backend_fox.ATTENTION_BACKENDS, *WRONG))
    monkeypatch.setattr(check, "PROVED", ((1, 1, 37),))
    return check


def test_a_wrong_implementation_is_named(check, monkeypatch, tmp_path, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(check, "CANDIDATES", [*WRONG, "forgetting_triton", "sdpa"])
    assert check.main(["--device", "cpu", "--minutes", "9", "--output", str(tmp_path / "x.json")]) == 1
    printed, failed = capsys.readouterr()
    wrong = "wrong_gradient (training, head_dim=16), without_gate (training, head_dim=16), "
    wrong += "without_gate (prefill, head_dim=16), without_gate (decoding, head_dim=16)."
    assert f"These implementations are wrong: {wrong}" in failed
    assert "| wrong_gradient | WRONG: dq exceeds its budget" in printed and "no kernel for this GPU" in printed
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    right = {(row["work"], row["name"]) for row in rows if row.get("right")}
    assert {(work, name) for work in check.WORK for name in ("forgetting_triton", "sdpa")} <= right
    assert {row["section"] for row in rows} == check.TABLES.keys()
