"""scripts.bench.gpu.check names wrong implementations and times the others, in a dry run on a CPU."""

import json

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_longctx.fox import backend_fox


pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
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
    timed = {section: {} for section in check.TABLES}
    for row in rows:
        timed[row["section"]] |= {row.get("name"): row} if "error" not in row else {}
    for name in ("forgetting_triton", "forgetting_triton, all keys", "sdpa", "SDPA flash, no gate"):
        assert timed["batch"][name]["work"] == "prefill" and timed["batch"][name]["forward_ms"] > 0
    (trained,) = [x for x in rows if (x["section"], x.get("work"), x.get("name")) == ("batch", "training", "sdpa")]
    assert trained["backward_ms"] > 0
    assert {"forgetting_triton", "sdpa"} <= timed["decoding"].keys()
    (pruned,) = [row for row in rows if row["section"] == "pruning"]
    assert pruned["share_pruned"] == 0 and pruned["both_speedup"] > 0  # sixteen tokens are one block
    assert timed["step"].keys() == {
        "Llama, sdpa",
        *(f"FoX (Pro), {name}" for name in ("sdpa", "forgetting_triton", "auto")),
    }


def test_a_cache_grows_with_every_timed_token(check, monkeypatch):
    lengths, attend = [], check.attend

    def counted(module, q, k, v, log_f, call, past):
        result = attend(module, q, k, v, log_f, call, past)
        lengths.append(past.cache.get_seq_length())
        return result

    monkeypatch.setattr(check, "attend", counted)
    assert check.time_decoding("sdpa", 16, 8, "cpu")["ms"] > 0
    assert lengths == [7, 8, 9, 10, 11]


def test_a_row_without_time_left_is_reported(check, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "CANDIDATES", ["sdpa"])
    assert check.main(["--device", "cpu", "--minutes", "0", "--output", str(tmp_path / "x.json")]) == 0
    assert {row["error"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]} == {"no time left"}
