"""Round trips through remote code, PEFT, pipelines, torch.export and lm-eval give equal results."""

import json

import pytest
import torch
import transformers
from commands import run
from tiny_fox import TINY, VARIANTS, both_blocks, check_logits, logits, make, make_from, tokens

from hf_longctx.fox import FoxConfig
from scripts.client_checks.exporting import difference_of_generation


asks_for_an_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft does
GROUPED = "pro with grouped heads and rope"
ONE_LAYER = FoxConfig.pro(
    **TINY | dict(num_hidden_layers=1), num_key_value_heads=2
)  # tracing takes time for each layer
HEADS = ["AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering"]
REMOTE = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_longctx", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]
import torch
import transformers

ids, outputs = torch.arange(3, 20)[None], {}
for name, folder, again in json.loads(sys.argv[1]):
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        outputs[folder] = model(ids)[0].flatten().tolist()
    if again:
        model.save_pretrained(again)
    if name == "AutoModelForCausalLM":
        outputs[folder] += model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0].tolist()
        try:
            model.set_attn_implementation("forgetting_triton")
        except ImportError as error:
            assert "require Triton: pip install" in str(error)
        else:
            raise AssertionError("no triton, no error")
    assert transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "fox"
print(json.dumps(outputs))
"""


def test_remote_code_without_the_package_and_without_triton(tmp_path):
    """Each head is loaded from its folder and from a folder that remote code saved. The decoder is loaded from the
    folder of another model.
    """
    torch.manual_seed(0)
    models = {name: getattr(transformers, name).from_config(VARIANTS["pro"]()).eval() for name in HEADS}
    models |= {f"AutoModelForCausalLM {name}": make(name) for name in ("llama", "fixed", GROUPED)}
    ids, first, second, expected = torch.arange(3, 20)[None], [], [], {}
    for name, model in models.items():
        auto_class, folder, again = name.split()[0], str(tmp_path / name), str(tmp_path / f"{name} again")
        model.save_pretrained(folder)
        first.append((auto_class, folder, again))
        second.append((auto_class, again, None))
        with torch.no_grad():
            outputs = model(ids)[0].flatten().tolist()
        if auto_class == "AutoModelForCausalLM":
            outputs += model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0].tolist()
        expected[folder] = expected[again] = outputs
    decoder, model = str(tmp_path / "decoder"), make("llama")
    model.save_pretrained(decoder)
    second.append(("AutoModel", decoder, None))
    expected[decoder] = model.model(ids)[0].flatten().tolist()
    environment = {
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "",
        "HOME": str(tmp_path),
    }
    command = ["python", "-c", REMOTE, json.dumps([*first, *second])]
    done = run(command, cwd=tmp_path, env=environment, package=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_torch_export():
    """Export as transformers does: not strict, without a cache, with a dynamic length."""
    model = make_from(ONE_LAYER)
    length = torch.export.Dim("length", min=2, max=64)
    arguments = dict(input_ids=tokens(2, 9), use_cache=False)
    with torch.no_grad():
        program = torch.export.export(
            model, (), arguments, dynamic_shapes=dict(input_ids={1: length}, use_cache=None), strict=False
        )
    for ids in (tokens(2, 9), tokens(2, 23, seed=2)):
        got = program.module()(input_ids=ids, use_cache=False).logits
        check_logits(got, logits(model, ids))
    # ONNX export refuses a graph that writes into a view
    in_place = [str(node.target) for node in program.graph.nodes if "fill_" in str(node.target)]
    assert not in_place


@torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # this cache costs more than it saves
@pytest.mark.filterwarnings("ignore:.treespec:FutureWarning")  # transformers reads one as torch no longer likes
def test_an_export_decodes_what_it_has_read():
    """The graphs of transformers.exporters for a prompt and for a token after it pass the sum and the shift on."""
    model = make_from(ONE_LAYER)
    assert difference_of_generation(model, "Dynamo") < 2e-5


def test_torch_export_refuses_a_static_cache():
    """transformers.integrations.executorch gives its keys no room for the decay, and forgets the token shift."""
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model = make("pro")
    model.generation_config.cache_implementation = "static"
    exportable = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=32)
    with pytest.raises(Exception, match=r"FoX cannot be exported with a static cache.*DynamicCache"):
        exportable.export(input_ids=tokens(1, 1), cache_position=torch.tensor([0]), strict=False)


@asks_for_an_old_name
@both_blocks
def test_the_gate_is_adapted_by_target_parameters(variant, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[], target_parameters=["f_proj.weight"])
    adapted, ids = peft.get_peft_model(make(variant), config).train(), tokens()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=10.0)
    for _ in range(2):  # the first step moves one factor alone, because the other is 0
        optimizer.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    want = logits(adapted.eval(), ids)
    assert (want - logits(make(variant), ids)).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(make(variant), tmp_path / "adapter").eval()
    check_logits(logits(loaded, ids), want)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    check_logits(logits(merged, ids), want)


@asks_for_an_old_name
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # peft uses it
def test_prefix_tuning_is_refused_by_its_name_and_prompt_tuning_works_instead():
    peft = pytest.importorskip("peft")
    ids, model = tokens(), make("pro")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match=r"PEFT.s prefix tuning.*use prompt tuning \(PromptTuningConfig\) or LoRA"):
        peft.get_peft_model(make("llama"), prefix)(input_ids=ids)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(model, prompt).eval()
    embeds = torch.cat([tuned.get_prompt(len(ids)), model.get_input_embeddings()(ids)], 1)
    torch.testing.assert_close(tuned(input_ids=ids).logits, model(inputs_embeds=embeds).logits)
