"""The paper's algorithm against the authors' implementation: values and gradients of every golden case."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_longctx.hmt import from_official, official_parameters


LLAMA = ["full", "evict", "sumfull", "ragged7", "ragged11", "batch2", "leftpad", "oddL13", "oddL15", "k0", "single"]
LLAMA += ["stage1", "stage1_bptt2", "rmt", "rmt_m2", "retloss"]
CASES = [f"llama_{name}" for name in LLAMA]
CASES += ["opt_full", "opt_stage1", "opt_leftpad", "mamba_full", "mamba_stage1", "rwkv_full"]
RETRIEVAL_LOSS_WEIGHT = 0.05  # weight of the auxiliary loss in llama_retloss, which HMTWrapper does not have


# Rounding in float32, by the manifest's `fp32_noise` (largest of all cases): logits and memories 3.2e-6, scores 4e-7,
# losses 1e-6, gradients 7e-6 of their norm. The authors' code and ours may both be off.
VALUE, LOSS, GRADIENT = 6 * 3.2e-6, 10 * 1e-6, 14 * 7e-6


class Case:
    """One golden case: its settings, tensors, and a wrapper with its parameters."""

    def __init__(self, folder, name):
        manifest = json.loads((folder / "manifest.json").read_text())
        (self.info,) = [c for c in manifest["cases"] if c["name"] == name]
        self.tensors = load_file(folder / self.info["file"])
        self.backbone_info = manifest["backbones"][self.info["backbone"]]
        self.backbone_weights = load_file(folder / self.backbone_info["file"])

    def group(self, prefix):
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}

    def inputs(self):
        inputs = self.group("inputs/")
        inputs.pop("pos_mask", None)  # an input of the retrieval loss
        return inputs

    def wrapper(self, attention=None):
        model_class = getattr(transformers, self.backbone_info["model_class"])
        settings = dict(self.backbone_info["config"])
        attention = attention or settings.pop("attn_implementation", None)
        config = model_class.config_class(**{k: v for k, v in settings.items() if k != "attn_implementation"})
        backbone = model_class._from_config(config, attn_implementation=attention)
        backbone.load_state_dict(self.backbone_weights)
        # RWKV rescales its weights in eval mode and cannot be differentiated there; no backbone has dropout
        backbone.train(self.info["backbone"] == "rwkv")
        info = self.info
        return from_official(
            backbone,
            self.group("params/"),
            segment_length=info["L"],
            sensory_tokens=info["k"],
            memory_size=info.get("N"),
            sum_fraction=info["sum_fraction"],
            recall=info["recall"],
            memory_tokens=info["m"],
            recall_mode="paper",
        )


@pytest.fixture(params=CASES)
def case(request, golden):
    return Case(golden / "hmt", request.param)


def test_every_stored_case_is_listed(golden):
    manifest = json.loads((golden / "hmt" / "manifest.json").read_text())
    assert {c["name"] for c in manifest["cases"]} == set(CASES)


@pytest.mark.parametrize("scope", ["last", "all"])
def test_values_and_gradients(case, scope):
    model = case.wrapper()
    model.configure(loss_scope=scope)
    expected = case.group("expected/")
    out = model(**case.inputs(), output_recall=True)

    torch.testing.assert_close(out.logits, expected["logits"], atol=VALUE, rtol=0)
    torch.testing.assert_close(torch.stack(out.memories), expected["memory"], atol=VALUE, rtol=0)
    retrieval_loss = RETRIEVAL_LOSS_WEIGHT * expected.get("ret_loss", torch.zeros(1))
    torch.testing.assert_close(out.loss[None], expected[f"loss_{scope}"] - retrieval_loss, atol=LOSS, rtol=0)
    for n, scores in enumerate(out.recall_scores):
        if f"scores.{n}" in expected:
            torch.testing.assert_close(scores, expected[f"scores.{n}"], atol=VALUE, rtol=0)
        else:
            assert scores is None
    if "recall_distance" in expected:
        assert torch.equal(out.recall_distance[1:], expected["recall_distance"].long())

    if "ret_loss" in expected:
        return  # the golden gradients include those of the retrieval loss
    out.loss.backward()
    named = {**official_parameters(model), "input_embeddings": model.get_input_embeddings().weight}
    gradients = case.group(f"grad_{scope}/")
    norms = gradients.pop("backbone_norms")
    floor = torch.finfo(torch.float32).eps * norms.norm()  # the gradient of a key's bias is 0, from terms that cancel
    for name, parameter in named.items():
        if name in case.info["grad_missing"]:
            assert parameter.grad is None
        else:
            difference = (parameter.grad - gradients[name]).norm()
            assert difference <= GRADIENT * gradients[name].norm() + floor, name
    backbone = dict(model.backbone.named_parameters())
    for name, norm in zip(case.info["backbone_param_names"], norms):
        gradient = backbone[name].grad
        assert abs((0 if gradient is None else gradient.norm()) - norm) <= GRADIENT * norm + floor, name


@pytest.mark.parametrize("name", ["llama_full", "opt_full"])
def test_greedy_continuation_within_the_last_segment(golden, name):
    case = Case(golden / "hmt", name)
    settings = case.info["generate"]
    prompt = case.inputs()["input_ids"][:, : settings["prompt_len"]]
    ids = case.wrapper().generate(
        prompt, max_new_tokens=settings["new_tokens"], do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(ids[:, prompt.shape[1] :], case.group("expected/")["generated"].long())


def test_sdpa_agrees(golden):
    case = Case(golden / "hmt", "llama_leftpad")
    logits = case.wrapper(attention="sdpa")(**case.inputs()).logits
    torch.testing.assert_close(logits, case.group("expected/")["logits"], atol=VALUE, rtol=0)
