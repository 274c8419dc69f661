"""scripts.bench.gpu.check names wrong implementations, and times the others; on a CPU by Triton's interpreter."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_longctx.fox import backend_fox, forgetting_attention_ref


pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are for machines without a GPU"),
]


class WrongGradient(torch.autograd.Function):
    """As FlashAttention-4 at widths that are no multiple of 32: the last columns of dq hold something else."""

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
    wrong = "wrong_gradient (training, heads of 16), without_gate (training, heads of 16), "
    wrong += "without_gate (prefill, heads of 16), without_gate (decoding, heads of 16)."
    assert f"These compute FoX wrongly: {wrong}" in failed
    assert "| wrong_gradient | WRONG: dq is off by" in printed and "no kernel for this GPU" in printed
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    right = {(row["work"], row["name"]) for row in rows if row.get("right")}
    assert {(work, name) for work in check.WORK for name in ("forgetting_triton", "sdpa")} <= right
    timed = {
        section: {row["name"] for row in rows if row["section"] == section and "ms" in row} for section in check.TABLES
    }
    assert {"forgetting_triton", "sdpa", "SDPA flash (no gate)"} <= timed["batch"]
    assert {"forgetting_triton", "sdpa"} <= timed["decoding"]
    assert timed["step"] == {"Llama, sdpa", *(f"FoX (Pro), {name}" for name in ("sdpa", "forgetting_triton", "auto"))}


def test_a_cache_grows_with_every_timed_token(check, monkeypatch):
    lengths, attend = [], check.attend

    def counted(module, q, k, v, log_f, call, past):
        result = attend(module, q, k, v, log_f, call, past)
        lengths.append(past.cache.get_seq_length())
        return result

    monkeypatch.setattr(check, "attend", counted)
    assert check.time_decoding("sdpa", 16, 8, "cpu")["ms"] > 0
    assert lengths == [7, 8, 9, 10, 11]


def test_what_has_no_time_left_is_said(check, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "CANDIDATES", ["sdpa"])
    assert check.main(["--device", "cpu", "--minutes", "0", "--output", str(tmp_path / "x.json")]) == 0
    assert {row["error"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]} == {"no time left"}


@pytest.mark.parametrize("D, widths", [(64, (72, 72, 72)), (128, (136, 136, 128))])
def test_flash_attention_3_reads_values_of_their_own_width_where_it_has_a_kernel(check, D, widths, monkeypatch):
    def flash(q, k, v, causal, softmax_scale):
        assert tuple(x.shape[-1] for x in (q, k, v)) == widths
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*inputs, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "some_flash", SimpleNamespace(flash_attn_func=flash))
    inputs = check.budget.draw(1, 2, 2, 20, 20, D)[:4]
    got = check.peers.folded_flash("some_flash", 8)(*inputs)
    torch.testing.assert_close(got, forgetting_attention_ref(*inputs), atol=1e-4, rtol=0)
