"""The authors' numbers: model, decoding, generation, operator and initialisation (golden vectors, float32)."""

import itertools

import pytest
import torch
from budget import DEVICE, runs_triton
from golden_fox import check, load_cases, weights

import hf_longctx.fox as fox
from hf_longctx.fox.modeling_fox import decay_time_bias


BACKENDS = ("eager", "sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_gradients(golden, backend):
    for case, t in load_cases(golden / "fox", "forward"):
        model = fox.from_official(weights(t), case["config"])
        model.set_attn_implementation(backend)
        mask = t.get("inputs/attention_mask")
        out = model(t["inputs/input_ids"], attention_mask=mask, output_hidden_states=True, use_cache=False)
        assert check(case, t, "expected/logits", out.logits), case["name"]
        for i, hidden in enumerate(out.hidden_states):
            if f"expected/hidden_states/{i}" in t:
                check(case, t, f"expected/hidden_states/{i}", hidden)
        if "inputs/labels" in t:  # aligned with the logits, and 0 where the label is -100
            labels = t["inputs/labels"]
            loss = torch.nn.functional.cross_entropy(out.logits.mT, labels, reduction="none")
            check(case, t, "expected/loss_per_token", loss)
            ours = model(t["inputs/input_ids"], attention_mask=mask, labels=labels, shift_labels=labels).loss
            check(case, t, "expected/loss_mean", ours)
        gradients = [name for name in t if name.startswith("expected/grad/")]
        if gradients:
            ours.backward()
            check_gradients(case, t, model)


def check_gradients(case, t, model):
    tolerance = next(c["tol"] for c in case["compare"] if c["key"] == "expected/grad/*")
    # Gradients convert like weights do.
    expected = dict(
        fox.from_official({**weights(t), **weights(t, "expected/grad/")}, case["config"]).named_parameters()
    )
    changed = fox.from_official(weights(t), case["config"]).state_dict()
    compared = 0
    for name, parameter in model.named_parameters():
        want = expected[name].detach()
        if torch.equal(want, changed[name]):
            continue  # the case stores no gradient for this one
        error = (parameter.grad - want).abs().max() / want.abs().max()
        assert error <= tolerance, f"{case['name']} gradient of {name}: {error:.1e}"
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [None, 7], ids=["as stored", "prefill in chunks of 7"])
def test_decode(golden, backend, chunk):
    for case, t in load_cases(golden / "fox", "decode"):
        model = fox.from_official(weights(t), case["config"])
        model.set_attn_implementation(backend)
        ids, mask = t["inputs/input_ids"], t.get("inputs/attention_mask")
        prefill, total = case["call"]["prefill_length"], ids.shape[1]
        cache, logits = None, []
        borders = list(range(0, prefill, chunk or prefill)) + list(range(prefill, total + 1))
        for begin, end in itertools.pairwise(borders):
            visible = None if mask is None else mask[:, :end]
            out = model(ids[:, begin:end], attention_mask=visible, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        logits = torch.cat(logits, dim=1)
        assert check(case, t, "expected/prefill_logits", logits[:, :prefill])
        assert check(case, t, "expected/step_logits", logits[:, prefill:])


def test_generate(golden):
    for case, t in load_cases(golden / "fox", "generate"):
        model = fox.from_official(weights(t), case["config"])
        steps = t["expected/scores"].shape[1]
        out = model.generate(
            t["inputs/input_ids"],
            attention_mask=t["inputs/attention_mask"],
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, t["expected/sequences"])
        assert check(case, t, "expected/scores", torch.stack(out.logits, dim=1))


OPERATORS = ["folded", "reference", pytest.param("triton", marks=runs_triton)]


@pytest.mark.parametrize("backend", OPERATORS)
def test_operator(golden, backend):
    for case, t in load_cases(golden / "fox", "op"):
        if backend == "triton" and DEVICE == "cpu":  # interpreted; no head feels another, and rows differ in padding
            rows = slice(None) if "inputs/seq_start" in t else slice(-1, None)
            t = {name: x[rows, -1:] if x.ndim > 2 else x[rows] for name, x in t.items()}
        inputs = {name: t[f"inputs/{name}"].requires_grad_() for name in ("q", "k", "v", "log_fgate")}
        options = {"scale": case["call"]["sm_scale"], "backend": backend}
        if "inputs/seq_start" in t:
            positions = torch.arange(t["inputs/k"].shape[2])
            options["attention_mask"] = (positions >= t["inputs/seq_start"][:, None]).to(DEVICE)
        if backend == "triton" and case["call"]["adaptive_threshold"] == "auto":
            options["log_pruning_tolerance"] = -10.0
        out = fox.forgetting_attention(*(x.to(DEVICE) for x in inputs.values()), **options).cpu()
        assert check(case, t, "expected/out", out), case["name"]
        if "inputs/dout" in t:
            out.backward(t["inputs/dout"])
            for name, x in inputs.items():
                assert check(case, t, f"expected/d{name}", x.grad), (case["name"], name)


def test_operator_without_pruning(golden):
    for case, t in load_cases(golden / "fox", "op_acp"):
        mask = None
        if "inputs/seq_start" in t:
            mask = torch.arange(t["inputs/k"].shape[2]) >= t["inputs/seq_start"][:, None]
        out = fox.forgetting_attention(*(t[f"inputs/{x}"] for x in ("q", "k", "v", "log_fgate")), attention_mask=mask)
        assert check(case, t, "expected/out_dense", out)


def test_decay_time_initialisation(golden):
    ((case, t),) = load_cases(golden / "fox", "init")
    for i, run in enumerate(case["runs"] if "runs" in case else case["call"]["runs"]):
        bias = decay_time_bias(run["num_heads"], run["decay_time_min"], run["decay_time_max"])
        torch.testing.assert_close(bias, t[f"expected/run{i}/fgate_bias"], atol=1e-4, rtol=1e-4)
