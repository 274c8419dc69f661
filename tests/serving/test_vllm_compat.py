"""All that the plugin takes from vLLM is in one file and still there, and no model of vLLM suffers where it is not."""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_longctx import vllm as plugin
from hf_longctx.vllm import compat


# Of what `PLACES` names: parameters that we give or take, and attributes that we read or override.
PARAMETERS = {
    "AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    "FullAttentionSpec": "block_size num_kv_heads head_size head_size_v dtype tokens_per_state",
    "LlamaDecoderLayer": "vllm_config prefix config attn_layer_type",
    "LlamaForCausalLM._init_model": "vllm_config prefix layer_type",
    "LlamaModel.forward": "input_ids positions intermediate_tensors inputs_embeds",
    "SlidingWindowSpec": "sliding_window block_size num_kv_heads head_size head_size_v dtype tokens_per_state",
    "direct_register_custom_op": "op_name op_func mutates_args fake_impl target_lib",
    "get_rope": "head_size max_position rope_parameters",
}
ATTRIBUTES = {
    "AttentionBackend": "get_name get_supported_kernel_block_sizes get_impl_cls get_builder_cls supported_dtypes",
    "AttentionLayerBase": "bind_kv_cache get_kv_cache_spec get_attn_backend supports_dcp",
    "AttentionMetadataBuilder": "_cudagraph_support",
    "ModelArchConfigConvertorBase": "get_head_size",
    "VerifyAndUpdateConfig": "verify_and_update_config verify_and_update_model_config",
}
FIELDS = {
    "vllm.config:CompilationConfig": "static_forward_context splitting_ops",
    "vllm.forward_context:ForwardContext": "attn_metadata no_compile_layers",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc seq_lens block_table_tensor slot_mapping",
}


def find(path):
    name, *attributes = path.split(".")
    found = getattr(compat, name)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


@pytest.fixture(scope="module")
def installed():
    return pytest.importorskip("vllm", reason="vLLM needs an environment of its own", exc_type=ImportError)


@pytest.mark.parametrize("name", compat.PLACES)
def test_the_name_is_still_there(installed, name):
    assert find(name) is not None  # else an ImportError that names it and its place


@pytest.mark.parametrize("path", PARAMETERS)
def test_the_parameters_are_still_there(installed, path):
    missing = set(PARAMETERS[path].split()) - inspect.signature(find(path)).parameters.keys()
    assert not missing, f"{path} of vLLM {installed.__version__} has no {missing} any more."


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_the_attributes_are_still_there(installed, path):
    missing = [name for name in ATTRIBUTES[path].split() if not hasattr(find(path), name)]
    assert not missing, f"{path} of vLLM {installed.__version__} has no {missing} any more."


@pytest.mark.parametrize("place", FIELDS)
def test_the_fields_are_still_there(installed, place):
    module, name = place.split(":")
    fields = getattr(pytest.importorskip(module), name).__dataclass_fields__
    assert set(FIELDS[place].split()) <= fields.keys(), f"{place} of vLLM {installed.__version__}"


def test_everything_of_vllm_is_taken_from_one_file():
    folder = Path(plugin.__file__).parent
    sources = {file.name: file.read_text() for file in folder.glob("*.py") if file.name != "compat.py"}
    assert not [name for name, source in sources.items() if re.search(r"^\s*(from|import) vllm", source, re.M)]
    unused = [name for name in compat.PLACES if not any(re.search(rf"\b{name}\b", s) for s in sources.values())]
    assert not unused, f"compat.py has what nobody uses: {unused}"


@pytest.mark.parametrize(
    "release, found", [("0.32.0", "vllm.moved has no"), ("0.41.2", "this is vLLM 0.41"), ("dev", "dev")]
)
def test_another_vllm_is_a_warning(monkeypatch, caplog, release, found):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    for name in compat.PLACES:
        monkeypatch.setitem(compat.PLACES, name, "vllm.moved")
    for module in ("checks", "widths"):  # where vLLM is, they have been imported
        monkeypatch.delitem(sys.modules, f"hf_longctx.vllm.{module}", raising=False)
    monkeypatch.setattr(plugin.logger, "handlers", [caplog.handler])  # vLLM's loggers do not tell the root
    monkeypatch.setattr(plugin.logger, "propagate", False)
    plugin.register()
    (message,) = caplog.messages
    assert "needs vLLM 0.32 or 0.33" in message and found in message and "Other models are not concerned" in message
