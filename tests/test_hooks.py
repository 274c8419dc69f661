"""Private parts of other libraries that we override, set or read: each is still where our code expects it.

A row contains a name in our code, the place in the library, a text in the source of this place, and the purpose.
"""

import importlib
import inspect
import platform
import re
from pathlib import Path

import pytest

import hf_longctx
from hf_longctx.fox.compat_fox import CACHE


TESTS = Path(__file__).parent
FILES = list(Path(hf_longctx.__file__).parent.rglob("*.py"))
TRAINER = "transformers.trainer:Trainer"
MODEL = "transformers.modeling_utils:PreTrainedModel"
GENERATION = "transformers.generation.utils:GenerationMixin"
BATCHING = "transformers.generation.continuous_batching"
ACCELERATE = "transformers.integrations.accelerate"
SHARDS = "accelerate.data_loader"
HOOKS = [
    # name in our code, module:object of the library, text in the source of this object, purpose
    ("_run_epoch", TRAINER, "self._run_epoch(", "a run that is resumed after its last step takes no step more"),
    (
        "prediction_step",
        TRAINER,
        "self.prediction_step(model, inputs, prediction_loss_only",
        "losses of parts of a row",
    ),
    ("on_save", TRAINER, "self.callback_handler.on_save(self.args", "a complete checkpoint is marked"),
    ("gather_function", TRAINER, "self.gather_function(losses", "losses of parts of a row are added"),
    ("num_processes", f"{SHARDS}:BatchSamplerShard", "self.num_processes", "groups of processes share rows"),
    ("process_index", f"{SHARDS}:BatchSamplerShard", "self.process_index", "groups of processes share rows"),
    ("even_batches", f"{SHARDS}:BatchSamplerShard", "self.even_batches", "groups of processes share rows"),
    ("cp_size", "accelerate.parallelism_config:ParallelismConfig", "cp_size", "accelerate may not divide rows"),
    ("_can_set_attn_implementation", MODEL, "self._can_set_attn_implementation()", "the implementation can change"),
    (
        "_prepare_cache_for_generation",
        "transformers.generation:GenerationMixin",
        "self._prepare_cache_for_generation(\n            generation_config, model_kwargs",
        "generate creates the cache of head windows",
    ),
    ("_attn_implementation", "transformers:PreTrainedConfig", "def _attn_implementation(self)", "windows are guarded"),
    ("get_correct_attn_implementation", MODEL, "self.get_correct_attn_implementation(", "Triton that cannot run"),
    ("_current_level", "torch.autograd.forward_ad", "_current_level = -1", "auto takes what has derivatives"),
    ("_is_exporting_flag", "torch.compiler", "return _is_exporting_flag", "an export is not any compilation"),
    (
        "torch._C._are_functorch_transforms_active",
        "torch.autograd:backward",
        "if torch._C._are_functorch_transforms_active():",
        "no kernel of ours under a transform of torch.func",
    ),
    (
        "packed_metadata",
        "triton.compiler.compiler:CompiledKernel",
        "stream, self.function, self.packed_metadata, launch_metadata",
        "a launch of a kernel is repeated",
    ),
    (
        "_empty_strided_cuda",
        "torch._inductor.codegen.wrapper",
        "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda",
        "memory of a repeated launch",
    ),
    (
        "is_in_torch_dispatch_mode",
        "torch.utils._python_dispatch",
        "def is_in_torch_dispatch_mode(",
        "kernels are operators",
    ),
    (
        "_forward_hooks",
        "torch.nn:Module",
        "self._forward_hooks or self._forward_pre_hooks",
        "norms are called for hooks",
    ),
    ("_backward_hooks", "torch.nn:Module", "self._backward_hooks or self._backward_pre_hooks", "same"),
    ("is_legacy_batchedtensor", "torch._subclasses.meta_utils", "is_legacy_batchedtensor(", "same"),
    ("_attn_implementation_internal", "transformers:PreTrainedConfig", "self._attn_implementation_internal", "masks"),
    ("_is_hf_initialized", MODEL, 'getattr(module, "_is_hf_initialized", False)', "a loaded backbone stays as it is"),
    ("_gradient_checkpointing_func", MODEL, 'setattr(module, "_gradient_checkpointing_func"', "segments made again"),
    ("AutoModel.register", "transformers.modeling_layers", "AutoModel.from_config(config)", "FoX under task heads"),
    ("_get_static_cache_init_shape", GENERATION, "self._get_static_cache_init_shape()", "a static cache with gates"),
    ("_prepare_cache_for_generation", GENERATION, "self._prepare_cache_for_generation(", "refused kinds of caches"),
    ("_expand_inputs_for_generation", GENERATION, "self._expand_inputs_for_generation(", "beams repeat an HMT state"),
    (
        "_supports_default_dynamic_cache",
        GENERATION,
        "not self._supports_default_dynamic_cache()",
        "HMT has a state in place of a cache",
    ),
    (
        "CACHE",
        "transformers.modeling_outputs:BaseModelOutputWithPast",
        f"{CACHE}: Cache | None",
        "outputs with a cache",
    ),
    ("CACHE", "transformers.modeling_layers", f'if "{CACHE}" in kwargs', "a checkpointed layer gets no cache"),
    ("accept_both_names", GENERATION, f'model_inputs["{CACHE}"] = {CACHE}', "`generate` names the cache"),
    ("create_masks_for_generate", GENERATION, f'{CACHE}=model_inputs.get("{CACHE}")', "`generate` names the cache"),
    ("_skip_keys_device_placement", ACCELERATE, "model._skip_keys_device_placement", "caches stay on their device"),
    ("keys_to_ignore_at_inference", TRAINER, '"keys_to_ignore_at_inference"', "an evaluation gathers no caches"),
    ("PagedAttentionCache", f"{BATCHING}.input_outputs", "cache=self.cache,", "pages are known by their type"),
    (
        "library.FoxForCausalLM",
        "transformers.cli.serving.model_manager",
        "getattr(transformers, config.arch",
        "hf-longctx serve",
    ),
    ("base_url", "lm_eval.models.api_models:TemplateAPI", "self.base_url = base_url", "endpoints have our reader"),
    ("cache_hook", "lm_eval.api.model:CachingLM", "set_cache_hook", "--use_cache knows requests of ids"),
    ("init_dynamic_modules", "evaluate.loading", '".py")).stat().st_mtime', "metrics found by their bare names"),
    ("init_dynamic_modules", "evaluate.loading", 'f"evaluate-{current_type}--{path}"', "metrics found by bare names"),
]


def test_private_names_of_torch_are_in_one_file_of_fox():
    private = re.compile(r"\btorch\.(\w+\.)*_(?!_)|forward_ad\._|\._is_zerotensor")
    files = {file.name for file in FILES if file.parent.name == "fox" and private.search(file.read_text())}
    assert files == {"torch_internals_fox.py"}


@pytest.mark.parametrize("name, place, text, purpose", HOOKS, ids=lambda value: value if value.isidentifier() else "")
def test_the_hook_is_still_there(name, place, text, purpose):
    users = [str(file.relative_to(TESTS.parent)) for file in FILES if name in file.read_text()]
    assert users, f"No file of ours has {name} any more: remove the row."
    module, _, attribute = place.partition(":")
    library = pytest.importorskip(module.partition(".")[0], reason=f"{', '.join(users)} reach into {module}")
    version = getattr(library, "__version__", f"of Python {platform.python_version()}")
    moved = f"{module} {attribute} of {library.__name__} {version} has moved"
    try:
        owner = importlib.import_module(module)
        source = inspect.getsource(getattr(owner, attribute) if attribute else owner)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{moved} ({error}), on which {', '.join(users)} depends: {purpose}.")
    assert text in source, f"{moved} away from {text!r}, on which {', '.join(users)} depends: {purpose}."
