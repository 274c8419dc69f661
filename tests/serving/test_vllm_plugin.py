"""vLLM still has the interfaces that the plugin uses, and serves other models where it does not."""

import importlib
import inspect
import sys
from types import SimpleNamespace

import pytest

from hf_longctx import vllm as plugin


# Parameters that we pass or accept, and attributes that we read or override.
PARAMETERS = {
    "attention.get_rope": "head_size max_position rope_parameters",
    "model.LlamaDecoderLayer": "vllm_config prefix config attn_layer_type",
    "model.LlamaForCausalLM._init_model": "vllm_config prefix layer_type",
    "model.LlamaModel.forward": "input_ids positions intermediate_tensors inputs_embeds",
    "state.AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    "state.FullAttentionSpec": "block_size num_kv_heads head_size head_size_v dtype tokens_per_state",
    "state.SlidingWindowSpec": "sliding_window block_size num_kv_heads head_size head_size_v dtype tokens_per_state",
    "state.direct_register_custom_op": "op_name op_func mutates_args fake_impl target_lib",
}
ATTRIBUTES = {
    "checks.VerifyAndUpdateConfig": "verify_and_update_config verify_and_update_model_config",
    "state.AttentionBackend": "get_name get_supported_kernel_block_sizes get_impl_cls get_builder_cls supported_dtypes",
    "state.AttentionLayerBase": "bind_kv_cache get_kv_cache_spec get_attn_backend supports_dcp",
    "state.AttentionMetadataBuilder": "_cudagraph_support",
    "widths.ModelArchConfigConvertorBase": "get_head_size",
}
FIELDS = {
    "vllm.config:CompilationConfig": "static_forward_context splitting_ops",
    "vllm.forward_context:ForwardContext": "attn_metadata no_compile_layers",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc seq_lens block_table_tensor slot_mapping",
}


def find(path):
    module, *attributes = path.split(".")
    found = importlib.import_module(f"hf_longctx.vllm.{module}")
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


@pytest.fixture(scope="module")
def installed():
    return pytest.importorskip("vllm", reason="vLLM needs an environment of its own", exc_type=ImportError)


@pytest.mark.parametrize("table", [PARAMETERS, ATTRIBUTES, FIELDS], ids=["parameters", "attributes", "fields"])
def test_the_interfaces_are_still_there(installed, table):
    missing = []
    for place, names in table.items():
        if table is PARAMETERS:
            present = inspect.signature(find(place)).parameters
        elif table is ATTRIBUTES:
            present = dir(find(place))
        else:
            module, name = place.split(":")
            present = getattr(importlib.import_module(module), name).__dataclass_fields__
        missing += [f"{place}: {name}" for name in set(names.split()) - {*present}]
    assert not missing, f"vLLM {installed.__version__} does not have {missing}."


@pytest.mark.parametrize(
    "release, found", [("0.32.0", "ModelRegistry"), ("0.41.2", "this is vLLM 0.41"), ("dev", "dev")]
)
def test_another_vllm_is_a_warning(monkeypatch, caplog, release, found):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    caplog.set_level("WARNING", plugin.logger.name)  # an engine of another test has set ERROR
    monkeypatch.setattr(plugin.logger, "handlers", [caplog.handler])  # vLLM's loggers do not propagate
    monkeypatch.setattr(plugin.logger, "propagate", False)
    plugin.register()
    (message,) = caplog.messages
    assert "needs vLLM 0.32 or 0.33" in message and found in message and "Other models are not affected" in message
