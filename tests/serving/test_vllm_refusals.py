"""What a FoX cannot do in vLLM is refused in the main process, before any worker starts."""

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
    """What vLLM does before it starts workers."""
    engine_args = vllm.EngineArgs(str(folder), skip_tokenizer_init=True, **{"max_model_len": 256} | options)
    return engine_args.create_engine_config()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype is 'fp8'.*--kv-cache-dtype bfloat16"),
        (dict(kv_offloading_size=1), "state for 16 tokens, which would stay behind. Leave both out"),
        (dict(model_impl="transformers", trust_remote_code=True), "leave out the forget gate.*FoxForCausalLM"),
    ],
    ids=["fp8 cache", "offloaded cache", "model of transformers"],
)
def test_refused_with_the_way_out(folder, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        configured(folder, **options)


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


def test_ranks_that_do_not_fit_the_key_heads_are_refused(tmp_path):
    save_fox("one gate per key head", tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size is 3; it must divide the 2 key heads"):
        configured(tmp_path, tensor_parallel_size=3)


def test_context_parallelism_is_refused(tmp_path):
    FoxForCausalLM(FoxConfig(**SIZES, num_key_value_heads=1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"decode_context_parallel_size is 2; .* Leave"):
        configured(tmp_path, tensor_parallel_size=2, decode_context_parallel_size=2)


def test_vllm_knows_how_wide_heads_are(folder, tmp_path):
    """Triton's backend would write beyond its buffers."""
    assert configured(folder).model_config.get_head_size() == 64  # 32, and three parts of a gate
    FoxForCausalLM(FoxConfig(**SIZES | dict(num_attention_heads=3), num_key_value_heads=1)).save_pretrained(tmp_path)
    assert configured(tmp_path).model_config.get_head_size() == 64
    save_fox("heads of 128", tmp_path)
    assert configured(tmp_path).model_config.get_head_size() == 160


def test_another_activation_is_refused(tmp_path):
    FoxForCausalLM(FoxConfig(**SIZES, hidden_act="gelu")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_act is 'gelu'.*hf-longctx serve"):
        configured(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="dynamic", factor=4.0),
        dict(rope_type="longrope", factor=4.0, short_factor=[1.0] * 16, long_factor=[2.0] * 16),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_that_depend_on_the_length_are_refused(tmp_path, rope):
    rope |= dict(rope_theta=1e4, original_max_position_embeddings=256)
    limit = 256 if rope["rope_type"] == "dynamic" else 1024
    FoxForCausalLM(FoxConfig(**SIZES | dict(max_position_embeddings=limit), rope_parameters=rope)).save_pretrained(
        tmp_path
    )
    configured(tmp_path, max_model_len=256)
    with pytest.raises(ValueError, match=r"max_model_len is 512, beyond the 256 positions .* --max-model-len 256"):
        configured(tmp_path, max_model_len=512)


def test_without_rope_any_length_can_be_served(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        configured(folder, max_model_len=8192)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the command of the README
    assert configured(folder, max_model_len=8192).model_config.max_model_len == 8192


def test_registering_twice_imports_no_model():
    code = """
import sys, vllm, hf_longctx.vllm
for _ in range(2): hf_longctx.vllm.register()
print("FoxForCausalLM" in vllm.ModelRegistry.get_supported_archs(), "hf_longctx.vllm.model" in sys.modules)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "True False"
