"""`import hf_longctx` is cheap, and afterwards the Auto classes know our models, in any order of imports."""

import subprocess
import sys
import types

import pytest


def run(code):
    result = subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_imports_no_model():
    """The Auto classes do not import our models either, unless one of them is used."""
    unused = "hf_longctx.fox", "hf_longctx.hmt", "evaluate", "scipy", "matplotlib"
    code = "from transformers import AutoConfig, AutoModelForCausalLM; AutoConfig.for_model('llama')"
    modules = f"print([m for m in {unused} if m in sys.modules])"
    assert run(f"import sys, hf_longctx, hf_longctx.metrics; {code}; {modules}") == "[]"


AUTO = "from transformers import AutoConfig, AutoModelForCausalLM"
# Nearly every file of tests imports transformers first, so these orders import it last.
ORDERS = [f"import hf_longctx; {AUTO}", f"import hf_longctx.fox.modeling_fox; {AUTO}"]
# Each order needs a process that has not imported transformers or this package; it has imported their dependencies.
IMPORT_IN_FORKS = f"""
import os, sys, huggingface_hub, scipy.optimize, torch._dynamo, torch.distributed.tensor
assert "transformers" not in sys.modules
for order in {ORDERS}:
    if os.fork() == 0:
        exec(order)
        fox = dict(model_type="fox", vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        config = AutoConfig.for_model("hmt", backbone_config=fox)
        model = AutoModelForCausalLM.from_config(config)
        print(type(model).__name__, type(model.backbone).__name__, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_the_auto_classes_know_our_models():
    """Here, an HMT around a FoX: its config is created by arguments, and the config of its backbone from a dict."""
    assert run(IMPORT_IN_FORKS).split() == ["HMTWrapper", "FoxForCausalLM"] * len(ORDERS)


def test_every_public_name_can_be_imported():
    import hf_longctx
    import hf_longctx.metrics

    for module in (hf_longctx, hf_longctx.metrics):
        for name in module.__all__ * 2:  # twice: what the first access imports must not take the name's place
            assert not isinstance(getattr(module, name), types.ModuleType)
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name  # noqa: B018
