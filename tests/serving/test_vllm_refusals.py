"""Options that a FoX does not support in vLLM raise in the main process, before any worker starts."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from served_fox import SIZES, save_fox, vllm

from hf_longctx.fox import FoxConfig, FoxForCausalLM


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fox")
    save_fox("pro", folder)
    return folder


def configured(folder, **options):
    """Create the config of an engine, as vLLM does before it starts workers."""
    engine_args = vllm.EngineArgs(str(folder), skip_tokenizer_init=True, **{"max_model_len": 256} | options)
    return engine_args.create_engine_config()


DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
LONGROPE = dict(rope_type="longrope", factor=4.0, rope_theta=1e4, original_max_position_embeddings=256)
LONGROPE |= dict(short_factor=[1.0] * 16, long_factor=[2.0] * 16)
BEYOND = r"max_model_len must be at most 256 .*got 512.* --max-model-len 256"
PARALLEL = dict(tensor_parallel_size=2, decode_context_parallel_size=2)


@pytest.mark.parametrize(
    "config, options, message",
    [
        ({}, dict(kv_cache_dtype="fp8"), "kv_cache_dtype must not be quantized.*'fp8'.*--kv-cache-dtype bfloat16"),
        ({}, dict(kv_offloading_size=1), "not the state of a FoX. Omit both options"),
        ({}, dict(model_impl="transformers", trust_remote_code=True), "omit the forget gate.*FoxForCausalLM"),
        (dict(num_key_value_heads=1), PARALLEL, "decode_context_parallel_size must be 1.*got 2.* Use tensor"),
        (dict(max_position_embeddings=256, rope_parameters=DYNAMIC), dict(max_model_len=512), BEYOND),
        (dict(rope_parameters=LONGROPE), dict(max_model_len=512), BEYOND),
    ],
    ids=["fp8 cache", "offloading", "transformers", "context parallel", "dynamic", "longrope"],
)
def test_what_is_not_supported_is_an_error_with_a_remedy(tmp_path, config, options, message):
    FoxForCausalLM(FoxConfig(**SIZES | config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        configured(tmp_path, **options)
    if message == BEYOND:
        configured(tmp_path, max_model_len=256)


def test_checks_of_vllm_for_models_of_transformers_stay():
    from hf_longctx.vllm.checks import VerifyAndUpdateConfig, not_by_transformers

    class Theirs(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config):
            raise RuntimeError("theirs")

    llama, fox = (SimpleNamespace(hf_config=SimpleNamespace(model_type=name)) for name in ("llama", "fox"))
    not_by_transformers().verify_and_update_model_config(llama)
    for config, expected in ((llama, "theirs"), (fox, "forget gate")):
        with pytest.raises((RuntimeError, ValueError), match=expected):
            not_by_transformers(Theirs).verify_and_update_model_config(config)


def test_vllm_knows_how_wide_heads_are(folder, tmp_path):
    """Triton's backend would write beyond its buffers."""
    assert configured(folder).model_config.get_head_size() == 64  # 32, and three parts of a gate
    FoxForCausalLM(FoxConfig(**SIZES | dict(num_attention_heads=3), num_key_value_heads=1)).save_pretrained(tmp_path)
    assert configured(tmp_path).model_config.get_head_size() == 64
    save_fox("heads of 128", tmp_path)
    assert configured(tmp_path).model_config.get_head_size() == 160


def test_registering_twice_imports_no_model():
    code = """
import sys, vllm, hf_longctx.vllm
for _ in range(2): hf_longctx.vllm.register()
print("FoxForCausalLM" in vllm.ModelRegistry.get_supported_archs(), "hf_longctx.vllm.model" in sys.modules)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "True False"
