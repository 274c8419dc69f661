"""The numbers of the paper's authors and of flash-linear-attention (golden vectors, float32)."""

import itertools

import pytest
import torch
from budget import DEVICE, check_golden, load_cases, runs_triton, weights

import hf_longctx.fox as fox
from hf_longctx.fox.modeling_fox import decay_time_bias


READERS = {"fox": fox.from_official, "fox_fla": fox.from_fla}
every_source = pytest.mark.parametrize("source", READERS)
every_backend = pytest.mark.parametrize("backend", ["eager", "sdpa"])


def load_models(folder, source, kind, backend="sdpa"):
    """Yield the model, the case and the tensors of each case."""
    for case, t in load_cases(folder / source, kind):
        model = READERS[source](weights(t), case["config"])
        model.set_attn_implementation(backend)
        yield model, case, t


@every_source
@every_backend
def test_forward_and_gradients(golden, source, backend):
    for model, case, t in load_models(golden, source, "forward", backend):
        options = {"attention_mask": t.get("inputs/attention_mask"), "use_cache": False}
        if "inputs/cu_seqlens" in t:
            lengths = t["inputs/cu_seqlens"].diff().tolist()
            options["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = t.get("inputs/labels")
        if source == "fox":  # labels are aligned with the logits
            options["shift_labels"] = labels
        out = model(t["inputs/input_ids"], labels=labels, output_hidden_states=True, **options)
        assert check_golden(case, t, "expected/logits", out.logits), case["name"]
        for i, hidden in enumerate(out.hidden_states):
            if f"expected/hidden_states/{i}" in t:
                check_golden(case, t, f"expected/hidden_states/{i}", hidden)
        if "expected/loss_per_token" in t:  # 0 where the label is -100
            loss = torch.nn.functional.cross_entropy(out.logits.mT, labels, reduction="none")
            check_golden(case, t, "expected/loss_per_token", loss)
        for name in ("expected/loss", "expected/loss_mean"):
            if name in t:
                assert check_golden(case, t, name, out.loss) or source == "fox", case["name"]
        if any(name.startswith("expected/grad/") for name in t):
            out.loss.backward()
            check_gradients(case, t, model)


def check_gradients(case, t, model):
    tolerance = next(c["tol"] for c in case["compare"] if c["key"] == "expected/grad/*")
    # Gradients convert like weights do.
    expected = dict(
        fox.from_official({**weights(t), **weights(t, "expected/grad/")}, case["config"]).named_parameters()
    )
    compared = 0
    for name, parameter in model.named_parameters():
        want = expected[name].detach()
        if torch.equal(want, parameter):
            continue  # the case stores no gradient for this one
        error = (parameter.grad - want).abs().max() / want.abs().max()
        assert error <= tolerance, f"{case['name']} gradient of {name}: {error:.1e}"
        compared += 1
    assert compared >= 5


@every_source
@every_backend
@pytest.mark.parametrize("chunk", [None, 7], ids=["as stored", "prefill in chunks of 7"])
def test_decode(golden, source, backend, chunk):
    for model, case, t in load_models(golden, source, "decode", backend):
        ids, mask = t["inputs/input_ids"], t.get("inputs/attention_mask")
        prefill, total = case["call"]["prefill_length"], ids.shape[1]
        cache, logits = None, []
        boundaries = [*range(0, prefill, chunk or prefill), *range(prefill, total + 1)]
        for begin, end in itertools.pairwise(boundaries):
            visible = None if mask is None else mask[:, :end]
            out = model(ids[:, begin:end], attention_mask=visible, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        logits = torch.cat(logits, dim=1)
        assert check_golden(case, t, "expected/prefill_logits", logits[:, :prefill])
        assert check_golden(case, t, "expected/step_logits", logits[:, prefill:])


def test_generate(golden):
    for model, case, t in load_models(golden, "fox", "generate"):
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
        assert check_golden(case, t, "expected/scores", torch.stack(out.logits, dim=1))


def test_both_layouts_of_one_model_are_one_model(golden):
    twins = 0
    for model, case, t in load_models(golden, "fox_fla", "forward"):
        if "official_config" in case:
            official = fox.from_official(weights(t, "weights_official/"), case["official_config"]).state_dict()
            converted, _ = fox.to_official(model)
            for name, tensor in weights(t, "weights_official/").items():
                assert torch.equal(converted[name], tensor), name
            assert all(torch.equal(x, official[name]) for name, x in model.state_dict().items())
            twins += 1
    assert twins == 2


NAMES = ("q", "k", "v", "log_fgate")


def check_operator(case, t, inputs, key, transposed=False, **options):
    """Compare the output of `forgetting_attention` and its gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    flip = (lambda x: x.transpose(1, 2)) if transposed else (lambda x: x)  # (B, T, H, ...) to (B, H, T, ...)
    out = flip(fox.forgetting_attention(*(flip(x).to(DEVICE) for x in leaves), **options)).cpu()
    assert check_golden(case, t, key, out), case["name"]
    if "inputs/dout" in t:
        out.backward(t["inputs/dout"])
        for name, x in zip(NAMES, leaves):
            assert check_golden(case, t, f"expected/d{name}", x.grad), (case["name"], name)


@pytest.mark.parametrize("kind, key", [("op", "expected/out"), ("op_acp", "expected/out_dense")])
@pytest.mark.parametrize("backend", ["folded", "reference", pytest.param("triton", marks=runs_triton)])
def test_operator(golden, backend, kind, key):
    for case, t in load_cases(golden / "fox", kind):
        if backend == "triton" and DEVICE == "cpu":  # interpreted; no head feels another, and rows differ in padding
            rows = slice(None) if "inputs/seq_start" in t else slice(-1, None)
            t = {name: x[rows, -1:] if x.ndim > 2 else x[rows] for name, x in t.items()}
        options = {"backend": backend, "scale": case["call"]["sm_scale"]}
        if "inputs/seq_start" in t:
            positions = torch.arange(t["inputs/k"].shape[2])
            options["attention_mask"] = (positions >= t["inputs/seq_start"][:, None]).to(DEVICE)
        if backend == "triton" and case["call"].get("adaptive_threshold") == "auto":
            options["log_pruning_tolerance"] = -10.0
        check_operator(case, t, [t[f"inputs/{name}"] for name in NAMES], key, **options)


@pytest.mark.parametrize("backend", ["folded", "reference"])
def test_operator_of_flash_linear_attention(golden, backend):
    for case, t in load_cases(golden / "fox_fla", "op"):
        options = {"scale": case["call"]["scale"], "window": case["call"]["window_size"], "backend": backend}
        if "inputs/cu_seqlens" in t:
            options["cu_seqlens"] = t["inputs/cu_seqlens"].to(DEVICE)
        check_operator(case, t, [t[f"inputs/{name}"] for name in NAMES], "expected/out", transposed=True, **options)


def test_decay_time_initialisation(golden):
    ((case, t),) = load_cases(golden / "fox", "init")
    for i, run in enumerate(case["runs"] if "runs" in case else case["call"]["runs"]):
        bias = decay_time_bias(run["num_heads"], run["decay_time_min"], run["decay_time_max"])
        torch.testing.assert_close(bias, t[f"expected/run{i}/fgate_bias"], atol=1e-4, rtol=1e-4)
