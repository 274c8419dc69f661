"""The state of a FoX layer. vLLM stores it as a second cache in the same blocks as the keys.

vLLM's scheduler therefore shares and frees the state together with the keys, in chunked prefill, prefix caching,
preemption and forking. The state does not depend on the attention backend. `sums.py` describes the content of the
state.
"""

import torch
from torch import library, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from .sums import TOKENS_PER_STATE, Step, carry, read_step, row_width


class FoxState(nn.Module, AttentionLayerBase):
    """A layer without weights that stores the state of a FoX layer in a vLLM cache.

    Args:
        gates: number of forget gates on this rank; may be 0.
        shifted: number of key and value elements per token that this rank caches for the token shift; may be 0.
        dtype: dtype of the keys.
        sliding_window: as in `FoxConfig`.
        prefix: name of the layer in vLLM.
    """

    supports_dcp = False

    def __init__(self, gates: int, shifted: int, dtype: torch.dtype, sliding_window: int | None, prefix: str):
        super().__init__()
        config = get_current_vllm_config()
        self.width = row_width(gates, shifted, dtype)
        self.dtype, self.sliding_window, self.prefix = dtype, sliding_window, prefix
        # In speculative decoding, a rejected draft token would overwrite a row that earlier tokens share.
        self.tokens_per_state = TOKENS_PER_STATE if config.speculative_config is None else 1
        self.kv_cache = torch.tensor([])
        compilation = config.compilation_config
        compilation.static_forward_context[prefix] = self
        # A CUDA graph would replay the step in which it was captured. Graphs are therefore split at this op.
        if compilation.splitting_ops and CARRY not in compilation.splitting_ops:
            compilation.splitting_ops.append(CARRY)

    def forward(self, log_f: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's cumulative sum `c`, and the previous token's keys and values; see `sums.carry`."""
        c, before = torch.empty_like(log_f), torch.empty_like(tokens)
        torch.ops.hf_longctx.fox_carry(log_f, tokens, c, before, _encode_layer_name(self.prefix))
        return c, before

    def get_kv_cache_spec(self, vllm_config):
        block_size = vllm_config.cache_config.block_size
        if block_size % self.tokens_per_state:
            raise ValueError(f"block_size must be a multiple of {self.tokens_per_state} for a FoX, got {block_size}.")
        # Use the dtype of the keys: with different dtypes, vLLM would fill every new block with zeros.
        size = dict(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.width * 4 // self.dtype.itemsize,
            head_size_v=0,
            dtype=self.dtype,
            tokens_per_state=self.tokens_per_state,
        )
        if self.sliding_window is not None:
            return SlidingWindowSpec(sliding_window=self.sliding_window, **size)
        return FullAttentionSpec(**size)

    def bind_kv_cache(self, kv_cache):  # (blocks, 1, rows per block, head_size), with any strides
        self.kv_cache = kv_cache.view(torch.float32).squeeze(1)

    def get_attn_backend(self):
        return FoxStateBackend


class FoxStateBackend(AttentionBackend):
    """A vLLM backend that describes the state cache and builds a `Step`, but does not compute attention."""

    @staticmethod
    def get_name():
        return "FOX_STATE"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(TOKENS_PER_STATE)]

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("FoxStateBackend does not compute attention.")

    @staticmethod
    def get_builder_cls():
        return FoxStateBuilder


class FoxStateBuilder(AttentionMetadataBuilder[Step]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        m, spec = common_attn_metadata, self.kv_cache_spec
        return read_step(
            m.query_start_loc[: m.num_reqs + 1],
            m.seq_lens[: m.num_reqs],
            m.block_table_tensor[: m.num_reqs],
            m.slot_mapping[: m.num_actual_tokens],
            spec.block_size,
            spec.tokens_per_state,
        )


@eager_break_during_capture
def fox_carry(
    log_f: torch.Tensor, tokens: torch.Tensor, c: torch.Tensor, before: torch.Tensor, layer_name: LayerNameType
) -> None:
    context, name = get_forward_context(), _resolve_layer_name(layer_name)
    steps = context.attn_metadata
    if steps is None:  # while vLLM measures its memory use
        c.zero_()
        before.zero_()
        return
    carry(steps[name], context.no_compile_layers[name].kv_cache, log_f, tokens, c, before)


def fox_carry_fake(
    log_f: torch.Tensor, tokens: torch.Tensor, c: torch.Tensor, before: torch.Tensor, layer_name: LayerNameType
) -> None:
    return


# fox_carry is a custom op because compiled code cannot read the forward context. It writes its outputs into arguments
# because piecewise CUDA graphs read their inputs at fixed addresses.
CARRY = "hf_longctx::fox_carry"
NAMESPACE = library.Library("hf_longctx", "FRAGMENT")  # this reference keeps the operator registered
options = dict(mutates_args=["c", "before"], fake_impl=fox_carry_fake, target_lib=NAMESPACE)
direct_register_custom_op("fox_carry", fox_carry, **options)
