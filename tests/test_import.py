"""`import hf_longctx` is cheap, and afterwards the Auto classes know our models, in any order of imports."""

import subprocess
import sys
import types

import pytest


def run(code):
    result = subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    heavy = "torch", "transformers", "triton", "evaluate", "datasets", "scipy", "numpy", "matplotlib"
    assert run(f"import sys, hf_longctx, hf_longctx.metrics; print([m for m in {heavy} if m in sys.modules])") == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import hf_longctx; from transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModelForCausalLM; import hf_longctx",
        "import hf_longctx.fox.modeling_fox; from transformers import AutoConfig, AutoModelForCausalLM",
        "import hf_longctx; from transformers import Trainer, AutoModelForCausalLM, AutoConfig",
    ],
)
def test_the_auto_classes_know_fox(imports):
    code = """
config = AutoConfig.for_model("fox", vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
print(type(AutoModelForCausalLM.from_config(config)).__name__, "triton" in sys.modules)
"""
    name, _ = run(f"import sys; {imports}{code}").split()
    assert name == "FoxForCausalLM"


def test_every_public_name_can_be_imported():
    import hf_longctx
    import hf_longctx.metrics

    for module in (hf_longctx, hf_longctx.metrics):
        for name in module.__all__ * 2:  # twice: what the first access imports must not take the name's place
            assert not isinstance(getattr(module, name), types.ModuleType)
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name  # noqa: B018
