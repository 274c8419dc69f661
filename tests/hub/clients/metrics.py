"""Metrics in Spaces: scoring without hf_longctx, measuring a model with it."""

import importlib.util

import checks
import evaluate


HAS_PACKAGE = importlib.util.find_spec("hf_longctx") is not None
SCORED = {
    "forgetting_curve": ({"predictions": [[[0, 0, 13, 14], [0, 0, 0, 14]]], "references": [[11, 12, 13, 14]]}, {}),
    "rope_base_check": ({"predictions": [1e4, 5e5], "references": [8192, 8192]}, {"head_dim": 128}),
}


def check_scores():
    results = {}
    for name, (rows, options) in SCORED.items():
        results[name] = evaluate.load(f"alice/{name}").compute(**rows, **options)
    assert results["forgetting_curve"]["points"][0]["copy_mean"] == 1
    assert results["rope_base_check"]["verdicts"] == ["violated", "holds"]


def check_a_model():
    if HAS_PACKAGE:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64))
        curve = evaluate.load("alice/forgetting_curve")
        options = {"data_type": "random", "lengths": [8], "repeats": 2, "bos_token_id": 1}
        assert len(curve.compute(model=model, corpus=None, **options)["points"]) == 1
        verdict = evaluate.load("alice/rope_base_check").compute(model=model)["verdict"]
        assert verdict in ("holds", "violated", "inconclusive")
        return
    for name, options in {"forgetting_curve": {}, "rope_base_check": {"minimum_base": False}}.items():
        try:
            evaluate.load(f"alice/{name}").compute(model="alice/fox", **options)
        except ImportError as error:
            assert "No module named 'hf_longctx'" in str(error)
        else:
            raise AssertionError("it was measured")


if __name__ == "__main__":
    checks.run(dict(globals()))
