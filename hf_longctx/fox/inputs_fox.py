"""The arguments of a call: which tokens are real, which documents share a row, who sees whom, and mistakes in them.

Each mistake raises one error that says how to mend it. Shapes, dtypes and types cost nothing to check. Values are
checked only where they lie on the CPU, since reading a value from a GPU would stall every step. While compiling,
values are not read at all.
"""

import difflib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs, logging

from .attention_fox import autocast_dtype
from .masks_fox import TreeMask, read_tree_mask


logger = logging.get_logger(__name__)
# What a call of the model may name. transformers passes on whatever else it is given.
NAMES = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache")
NAMES += ("logits_to_keep", *TransformersKwargs.__annotations__)
PART_OF_A_ROW = (
    "a part of a row which context or sequence parallelism has split, where the gates of one part would not fade the keys "
    "of the parts before, so FoX refuses it. Use `hf-longctx train --sequence-parallel N`, or another parallelism."
)


class Rows(NamedTuple):
    """What the rows of one call hold, the same for every layer.

    real: (B, T) bool, False at padding. None: every token is real.
    document_positions: (B, T), position of each token in its document, where rows hold several documents. None: each
        row is one document.
    position_ids: (1 or B, T), positions for RoPE.
    tree: what a mask of four dimensions says. None: a token sees all real tokens before it, in its document.
    shard: which part of the rows this process has, a `SequenceShard` of training/sequence_parallel.py; all of the
        above is then of the whole rows. None: the rows are here as a whole.
    """

    real: torch.Tensor | None = None
    document_positions: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    tree: TreeMask | None = None
    shard: Any = None

    def here(self, x):
        """Of (B, T, ...), what belongs to the tokens of this process."""
        return x if x is None or self.shard is None else self.shard.part(x)


PLAIN_ROWS = Rows()  # real tokens of one document per row


def read_rows(
    config, inputs_embeds, attention_mask, position_ids, past_key_values, cache=None, shard=None, **kwargs
) -> Rows:
    """Check one call of the model, and find padding, packed documents and positions in its arguments.

    Args:
        config: the `FoxConfig`.
        inputs_embeds: (B, T, hidden), of whole rows.
        attention_mask: (B, past + T), a mask of four dimensions as in `read_tree_mask`, the result of
            `create_masks_for_generate`, or None.
        position_ids: (1 or B, T) or None.
        past_key_values: a `Cache` or None.
        cache: the pages of continuous batching, for which transformers has prepared everything; else None.
        shard: as in `Rows`.
        kwargs: `cu_seq_lens_q` or `seq_idx`, as in `document_positions`, and what other parts of the model take.

    Raises:
        ValueError: tokens, mask, positions and cache do not fit together; or packed documents, or rows that several
            processes share, have padding or a cache.
    """
    if cache is not None:
        return Rows(position_ids=position_ids)
    if shard is not None and (attention_mask is not None or past_key_values is not None):
        raise ValueError(
            "rows that several processes share take no attention_mask and no cache. Padding at the end of a row needs no "
            "mask, only labels of -100."
        )
    check_names(config, kwargs)
    check_call(config, inputs_embeds, attention_mask, position_ids, past_key_values)
    documents = tree = None
    if isinstance(attention_mask, dict):
        real = attention_mask["real"]
    elif attention_mask is not None and attention_mask.ndim == 4:
        real, tree = None, read_tree_mask(config, attention_mask, *inputs_embeds.shape[:2], past_key_values)
    else:
        real = real_tokens(attention_mask, inputs_embeds.shape[1])
        if past_key_values is None or not torch.compiler.is_compiling():
            documents = document_positions(inputs_embeds, real, position_ids, **kwargs)
    if documents is not None and (real is not None or past_key_values is not None):
        problem = (
            "which a cache cannot tell apart. Leave past_key_values out, or run each document as a row of its own."
        )
        if real is not None:
            problem = (
                "and their attention_mask hides tokens. Leave attention_mask out: padding after the documents needs no "
                "mask, only labels of -100; or give each document a row of its own."
            )
        raise ValueError(
            "these rows hold packed documents (their position ids start again, or cu_seq_lens_q or seq_idx says so), "
            + problem
        )
    if position_ids is None:
        position_ids = documents
    if position_ids is None:
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + cached).unsqueeze(0)
    return Rows(real, documents, position_ids, tree, shard)


def real_tokens(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Which of the last `length` tokens are real, (B, T) bool; None if all are, or if the mask is not (B, past + T).

    Not transformers' `create_recurrent_attention_mask`: it takes a single token for a generated one, but a prompt may
    come token by token.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    real = attention_mask[:, -length:].bool()
    return None if not torch.compiler.is_compiling() and real.all() else real


def document_positions(
    inputs_embeds, real, position_ids, cu_seq_lens_q=None, seq_idx=None, **kwargs
) -> torch.Tensor | None:
    """Position of each token in its own document, (B, T), where rows hold several documents; None where no row does.

    A document starts where a collator's `cu_seq_lens_q` (N + 1,) or `seq_idx` (B, T) says so, or where the position
    ids do not rise from one token to the next. While compiling, when values cannot be read, position ids without a
    mask are taken for packed, as transformers does.
    """
    (batch, length), device = inputs_embeds.shape[:2], inputs_embeds.device
    compiling = torch.compiler.is_compiling()
    if cu_seq_lens_q is not None:
        if batch > 1 or (
            not compiling
            and (cu_seq_lens_q[0] != 0 or cu_seq_lens_q[-1] != length or (cu_seq_lens_q.diff() < 0).any())
        ):
            raise ValueError(
                "cu_seq_lens_q holds the borders of documents packed into one row: it needs a batch of one and must "
                f"rise from 0 to the length of the row; got an input of {(batch, length)} tokens and "
                f"{cu_seq_lens_q.tolist()}."
            )
        starts = torch.zeros(length + 1, dtype=torch.bool, device=device)
        starts = starts.index_fill(0, cu_seq_lens_q.to(device, torch.long), True)[None, :-1]
    elif seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(
                f"seq_idx is {tuple(seq_idx.shape)}; it must be {(batch, length)}, the number of the document of each token."
            )
        starts = F.pad(seq_idx.to(device).diff(dim=1) != 0, (1, 0), value=True)
    elif position_ids is None or length == 1 or (compiling and real is not None):
        return None
    else:
        position_ids = position_ids.to(device).expand(batch, -1)
        previous = position_ids[:, :-1]
        if real is not None:  # of the last real token
            last_real = (torch.arange(length, device=device) * real).cummax(1).values
            previous = position_ids.gather(1, last_real[:, :-1]).masked_fill(~real.cummax(1).values[:, :-1], -1)
        starts = F.pad(position_ids[:, 1:] <= previous, (1, 0), value=True)
        if real is not None:  # `generate` after right padding goes back too, but not to the first position of the row
            first = position_ids.gather(1, real.int().argmax(1, keepdim=True))
            starts = starts & real & (position_ids == first)
    if not compiling and not starts[:, 1:].any():
        return None
    if real is None and cu_seq_lens_q is None and seq_idx is None:
        check_document_starts(position_ids, starts)
    index = torch.arange(length, device=device)
    return index - torch.where(starts, index, 0).cummax(1).values


def can_be_cached(rows: Rows) -> bool:
    """Whether a new cache may be filled with these rows; warns once if packed documents forbid it.

    While compiling it may: documents that are only taken for packed may be continued.
    """
    if rows.document_positions is None or torch.compiler.is_compiling():
        return True
    logger.warning_once("Packed documents cannot be continued from a cache: none is returned for them.")
    return False


def split_heads(projected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(B, T, H * D) -> (B, T, H, D); ValueError if tensor parallelism has split a head."""
    if projected.shape[-1] % head_dim:
        raise ValueError(
            f"tensor parallelism has split a head: a process has {projected.shape[-1]} columns of a projection, and a "
            f"head has {head_dim}. Choose a tp_size that divides num_key_value_heads."
        )
    return projected.unflatten(-1, (-1, head_dim))


def check_gate_heads(log_f: torch.Tensor, gates_per_key: int, kv_heads: int) -> None:
    """Raise ValueError if tensor parallelism has split the key heads, but not their gates, log_f (B, H, T)."""
    if log_f.shape[1] != gates_per_key * kv_heads:
        raise ValueError(
            f"tensor parallelism splits key heads into parts of {kv_heads}, but leaves the {log_f.shape[1]} fixed gates "
            'whole. Give the model gates that can be split: forget_gate="bias_only".'
        )


def check_dtype(hidden_states: torch.Tensor, projection) -> None:
    """Raise ValueError if the input of the first layer has another dtype than its weights.

    Checked there because sharded weights have their dtype of computation only while a layer uses them.
    """
    if torch.compiler.is_compiling():
        return
    weight = getattr(projection, "weight", None)  # of a quantized layer, it may be a method
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else None
    plain = dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if plain and hidden_states.dtype != dtype and autocast_dtype(hidden_states.device) is None:
        raise ValueError(
            f"inputs_embeds is {hidden_states.dtype} but the weights are {dtype}; cast one of them: "
            "inputs_embeds.to(model.dtype)."
        )


def check_document_starts(position_ids: torch.Tensor, starts: torch.Tensor) -> None:
    """Raise ValueError if position ids (B, T) fall, at one of `starts` (B, T), to where no document can start.

    Or if every token starts one: position ids that are all 0 are a mistake.
    """
    if torch.compiler.is_compiling():
        return
    if starts.all(dim=1).any():
        raise ValueError(
            "position_ids do not rise in one of the rows, so every token would be a document of its own. Count the "
            "tokens of each document from 0, or leave position_ids out."
        )
    if (position_ids[:, 0] < 0).any():
        raise ValueError(
            f"position_ids start again and begin at {position_ids[:, 0].min()}; documents count from 0. Mark padding by "
            "an attention_mask with 0, not by position ids."
        )
    wrong = starts & (position_ids != position_ids[:, :1])
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids go from {position_ids[row, t - 1]} to {position_ids[row, t]} at token {t} of row {row}. "
            "Within a document they must rise, and the next document packed into the row must start with "
            f"{position_ids[row, 0]} again, as the first did."
        )


def check_ids(input_ids) -> None:
    """Raise ValueError unless these are integers; that they are below `vocab_size`, the embedding checks on a CPU."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        what = input_ids.dtype if isinstance(input_ids, torch.Tensor) else f"a {type(input_ids).__name__}"
        raise ValueError(
            f'input_ids is {what}; it must be a tensor of token ids: tokenizer(text, return_tensors="pt").input_ids.'
        )


def check_logits_to_keep(logits_to_keep) -> None:
    """Raise ValueError unless it is what `keep_positions` takes."""
    if not isinstance(logits_to_keep, torch.Tensor) and (not isinstance(logits_to_keep, int) or logits_to_keep < 0):
        raise ValueError(
            f"logits_to_keep={logits_to_keep}; it must be how many of the last positions have logits, 0 for all, or a "
            "tensor of positions."
        )


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The hidden states whose logits are asked for, as `slice_logits_to_keep` of transformers 5.23.

    Args:
        hidden_states: (B, T, hidden).
        logits_to_keep: how many of the last positions, 0 for all; or positions, int64, of all rows (P,) or of each row
            (B, P); or a mask of them, (B, T) bool.

    Returns:
        (B, P, hidden), or (positions in all rows, hidden) for a mask.
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.ndim != 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


def check_labels(labels, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless labels are None, or integers of this shape, that of the logits."""
    if labels is None or torch.compiler.is_compiling():
        return
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape != shape:
        what = (
            f"{labels.dtype} of {tuple(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
        )
        raise ValueError(
            f"labels is {what}; it must be integers of {tuple(shape)}: the token ids themselves, which are shifted here, with "
            "-100 where no loss is wanted."
        )


def beyond_vocabulary(name: str, ids: torch.Tensor, vocab_size: int) -> ValueError:
    """What to raise where ids have led out of a table of `vocab_size` rows, which a CPU notices by itself."""
    return ValueError(
        f"{name} holds ids from {ids.min()} to {ids.max()}; they must lie between 0 and {vocab_size - 1}, as vocab_size is "
        f"{vocab_size}. Is the tokenizer that of this model?"
    )


def check_first_positions(position_ids: torch.Tensor) -> None:
    """Raise ValueError if rows of position ids (B, T) may be parts of longer rows that several processes share.

    In one process, a row may start anywhere: RoPE sees differences of positions only.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and (position_ids[:, 0] > 0).any():
        raise ValueError(
            f"position_ids start at {position_ids[:, 0].max()} without a cache, in one of {dist.get_world_size()} "
            f"processes. That may be {PART_OF_A_ROW} Where a row is a whole text, count from 0."
        )


def check_attention_is_local(config) -> None:
    """Raise ValueError where PyTorch or DeepSpeed has replaced the attention by one that several processes share."""
    for function in (F.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)):
        package = getattr(function, "__module__", None) or ""
        if package.startswith(("torch.distributed", "deepspeed")):
            raise ValueError(f"{package} has replaced the attention: each process has {PART_OF_A_ROW}")


def check_names(config, kwargs: dict) -> None:
    """Raise ValueError for an argument that is nearly one of `NAMES`, and where attention shall not be causal."""
    if torch.compiler.is_compiling():
        return
    for name in ("cu_seq_lens_q", "seq_idx"):
        if not isinstance(kwargs.get(name), torch.Tensor | None):
            raise ValueError(f"{name} is a {type(kwargs[name]).__name__}; it must be a tensor: torch.tensor({name}).")
    for name in kwargs.keys() - NAMES:
        if closest := difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8):
            raise ValueError(f"{name!r} is no argument of this model; {closest[0]!r} is.")
    if not (kwargs.get("is_causal", True) and getattr(config, "is_causal", True)):
        raise ValueError(
            "is_causal=False; the gates of a FoX forget the past, so its attention is causal. Leave it out."
        )


def check_call(config, inputs_embeds, attention_mask, position_ids, past_key_values) -> None:
    """Raise ValueError if tokens, mask, positions and cache do not fit together; arguments as in `read_rows`."""
    if torch.compiler.is_compiling():
        return
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != config.hidden_size:
        raise ValueError(
            f"the embedded input is {tuple(inputs_embeds.shape)}; it must be (B, T, {config.hidden_size}), from input_ids "
            "of (B, T). Give a single text as input_ids[None]."
        )
    batch, length = inputs_embeds.shape[:2]
    if batch == 0 or length == 0:
        raise ValueError(f"the input is empty: {batch} rows of {length} tokens. Give at least one token.")
    if position_ids is not None and not isinstance(position_ids, torch.Tensor):
        raise ValueError(
            f"position_ids is a {type(position_ids).__name__}; it must be a tensor. Leave it out to count from the cached "
            "tokens on."
        )
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids is {tuple(position_ids.shape)}; for {batch} rows of {length} tokens it must be "
            f"{(batch, length)} or {(1, length)}. Leave it out to count from the cached tokens on."
        )
    check_attention_is_local(config)
    if position_ids is not None and attention_mask is None and past_key_values is None:
        check_first_positions(position_ids)
    cached = 0 if past_key_values is None else count_cached(past_key_values, length, config.num_hidden_layers)
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor | dict):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor, (B, past + T) with 1 for a token "
            "and 0 for padding, or (B, 1, T, past + T) for a tree."
        )
    if isinstance(attention_mask, dict) and attention_mask.keys() != {"attention", "real"}:
        raise ValueError(
            f"attention_mask is a dictionary of {[*attention_mask]}; give the mask itself, one for all layers, or what "
            "model.create_masks_for_generate returns."
        )
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim not in (2, 4):
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be (B, past + T), 1 for a token and 0 for padding."
        )
    flat_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
    if flat_mask and cached is not None and attention_mask.shape != (batch, cached + length):
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be {(batch, cached + length)}: a column for "
            f"each of {cached} cached and {length} new tokens, 1 for a token and 0 for padding."
        )
    if flat_mask and attention_mask.device.type == "cpu":
        others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if len(others):
            raise ValueError(
                f"attention_mask holds {others[0].item()}; it must hold 1 for a token and 0 for padding. Convert a mask "
                "that is added to logits: (mask == 0).long()."
            )


def count_cached(past_key_values, length: int, depth: int) -> int | None:
    """Tokens in a cache; None where only the GPU knows.

    Raises:
        ValueError: it is no cache for `depth` layers, or has no room for `length` more tokens.
    """
    layers = getattr(past_key_values, "layers", None)
    if layers is None or len(layers) not in (0, depth):
        what = "no transformers Cache" if layers is None else f"for {len(layers)} layers"
        raise ValueError(
            f"this {type(past_key_values).__name__} is {what} and the model has {depth} layers; make a cache for this "
            "model: DynamicCache(config=model.config)."
        )
    cached = past_key_values.get_seq_length()
    if isinstance(cached, torch.Tensor):
        cached = int(cached) if cached.device.type == "cpu" else None
    needed = (cached or 0) + length
    for layer in layers[:1]:
        room = getattr(layer, "max_cache_len", None)  # of a static cache; a sliding window makes room by itself
        if room is not None and not layer.is_sliding and needed > room:
            raise ValueError(
                f"this {type(past_key_values).__name__} has room for {room} tokens and {needed} are needed; make it "
                "with a larger max_cache_len."
            )
    return cached
