"""The forgetting curve of a model: checks what is asked, then measures it, in one process or several.

What is measured is in curve.py, how a model predicts in engine.py; here they meet.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm

from ... import __version__
from ..run.engine import claimed_context, evaluating, first_parameter, text_config
from ..run.journal import Journal, content_hash
from ..run.served import LARGEST_VOCABULARY, EndpointModel
from .adaptive import BUDGET, locate
from .counts import Measurement, tally
from .result import (
    DATA_TYPES,
    ForgettingCurve,
    check_ids,
    check_lengths,
    input_tokens,
    longest_length,
    nested_order_samples,
    nested_random_samples,
    order_samples,
    random_samples,
)


PROTOCOLS = ("reference", "nested", "adaptive")


class PositionLimitError(ValueError):
    """The model has no position for an input this long.

    Attributes:
        limit: positions the model has, in tokens.
        longest_length: the longest length that can be measured, (limit - 3) // 2.
        curve: the `ForgettingCurve` of the lengths up to there.
    """

    def __init__(self, message: str, limit: int):
        super().__init__(message)
        self.limit = limit
        self.longest_length = longest_length(limit)


def forgetting_curve(
    model: nn.Module,
    tokens: Sequence[int] | None,
    *,
    lengths: Sequence[int],
    repeats: int = 10,
    seed: int = 0,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    data_type: str = "order",
    irrelevant_tokens: Sequence[int] | None = None,
    id_range: tuple[int, int] | None = None,
    protocol: str = "reference",
    confidence: float = 0.95,
    tokens_per_pass: int | None = None,
    journal=None,
    tokenizer=None,
    progress: bool = False,
) -> ForgettingCurve:
    """Measure how far a causal language model can copy what it has read (Liu et al. 2024, section 3).

    At each length n the model reads `[bos] S [bos] S [eos]` and `[bos] I [bos] S [eos]`, 2n + 3 tokens each, `repeats`
    times with another target S, and its greedy predictions of the second half of the last S are counted. The model
    runs in its own dtype, on its own device, in eval mode; its training flags are restored.

    Where torch.distributed is initialized (`torchrun`, `accelerate launch`), every process, with its own copy of the
    model, measures a part, and all return the whole curve.

    Args:
        model: a causal language model: `forward(input_ids)` returns logits (or an output with `.logits`), (B, T, V). Or
            a served one, see `EndpointModel`.
        tokens: the corpus, a flat sequence, array or tensor of ids, encoded without special tokens. At least three
            times the longest length. Not used, and may be None, for random data.
        lengths: target lengths in tokens, strictly ascending; see `linear_lengths` and `log_lengths`.
        repeats: targets per length.
        seed: of Python's `random.Random`, which draws where the targets start.
        bos_token_id, eos_token_id: default to those of the model's config, then of its generation config. Without a
            BOS the EOS takes its place. Without an EOS the BOS does: nothing that is scored comes after it.
        data_type: "order": S is a stretch of the corpus. "random": S and I are uniform random ids.
        irrelevant_tokens: I is the end of these ids; by default, the end of the corpus.
        id_range: lowest and highest id of random data, both included. Default (10, vocabulary size - 1), as the first
            ids are special tokens in many vocabularies. The BOS and EOS are never drawn.
        protocol: "reference": every length has its own targets, as the paper's program draws them. "nested": targets
            of all lengths begin alike, and so do their irrelevant texts, so that less has to be read: another estimate
            of the same curve, whose points are correlated. "adaptive": the inputs of "reference", but only at those of
            the `lengths`, and with only so many of the `repeats`, that the fine and the coarse length depend on; give
            a fine grid. See adaptive.py.
        confidence: at which the adaptive protocol is satisfied, between 0 and 1.
        tokens_per_pass: memory budget: most tokens in a forward pass, see `Engine`. Changes no number but by rounding.
        journal: path of a file that gets a line for every finished part at once. Given again after a crash, the run
            goes on from there, and ends with the same file. Process k > 0 of several writes to `PATH.k`.
        tokenizer: name it, or give it, to have its name in the settings.
        progress: show a progress bar, in work to do: long inputs count for more than their tokens.

    Returns:
        `ForgettingCurve` with one point per length. A length for which memory is short even in the smallest passes has
        no point, but is in `not_measured`, with the reason; so is one beyond the model's positions.

    Raises:
        ValueError: an argument does not fit; raised before the model runs. Or the model returns NaN. Or the journal is
            of another run.
        PositionLimitError: the model's position table is too short for some length. Raised after the others have been
            measured.

    Any exception that leaves this function once measuring has begun, also KeyboardInterrupt, has an attribute `curve`
    with what was measured until then, by this process.
    """
    lengths = check_lengths(lengths)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}. The paper uses 10.")
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {PROTOCOLS}, got {protocol!r}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}.")
    if tokens_per_pass is not None and tokens_per_pass < 1:
        raise ValueError(f"tokens_per_pass must be at least 1, got {tokens_per_pass}.")
    vocab_size = vocabulary_size(model)
    bos, eos = special_ids(model, bos_token_id, eos_token_id, vocab_size)
    settings = model_settings(model) | {
        "tokenizer": getattr(tokenizer, "name_or_path", tokenizer),
        "protocol": protocol,
        "data_type": data_type,
        "seed": seed,
        "repeats": repeats,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    if protocol == "adaptive":
        settings["confidence"] = confidence

    if data_type == "order":
        if id_range is not None:
            raise ValueError('id_range is for data_type="random"; data_type="order" takes its ids from tokens.')
        corpus = check_ids(on_cpu(tokens), "tokens", vocab_size)
        settings |= {"corpus_tokens": len(corpus), "corpus_sha256": content_hash(corpus)}
        if irrelevant_tokens is not None:
            irrelevant_tokens = check_ids(on_cpu(irrelevant_tokens), "irrelevant_tokens", vocab_size)
            settings["irrelevant_tokens"] = len(irrelevant_tokens)
            settings["irrelevant_sha256"] = content_hash(irrelevant_tokens)
        draw = nested_order_samples if protocol == "nested" else order_samples
        samples = draw(corpus, lengths, repeats, seed, irrelevant_tokens)
    elif data_type == "random":
        if irrelevant_tokens is not None:
            raise ValueError('data_type="random" draws its own irrelevant ids: drop irrelevant_tokens.')
        if vocab_size == LARGEST_VOCABULARY and id_range is None:
            raise ValueError(
                f"{model!r} does not tell the size of its vocabulary: give it vocab_size, or give id_range."
            )
        low, high = id_range or (10, vocab_size - 1)
        if not 0 <= low <= high < vocab_size:
            raise ValueError(f"id_range=({low}, {high}) must lie within the model's ids, 0 .. {vocab_size - 1}.")
        settings["id_range"] = [low, high]
        draw = nested_random_samples if protocol == "nested" else random_samples
        samples = draw((low, high), lengths, repeats, seed, skip=frozenset({bos, eos}))
    else:
        raise ValueError(f"data_type must be one of {DATA_TYPES}, got {data_type!r}.")

    limit = position_limit(model)
    if limit is None:
        warn_beyond_claim(model, lengths)
    fitting = [length for length in lengths if limit is None or input_tokens(length) <= limit]

    samples = dict(zip(lengths, samples))
    rank, processes = place_of(model)
    results_depend_on = settings | {"lengths": lengths}
    if journal is not None:
        results_depend_on |= identity(model)
    if processes > 1:
        results_depend_on |= {"process": rank, "processes": processes}
        journal = f"{journal}.{rank}" if journal is not None and rank else journal
    settings["versions"] = versions()

    cost = reading_cost(model)
    if protocol == "reference":
        mine = share_of(fitting, cost, rank, processes)
        total = 2 * repeats * sum(map(cost, mine))
    elif protocol == "nested":
        mine = range(rank, repeats, processes)
        total = 2 * len(mine) * sum(map(cost, fitting))
    else:
        total = BUDGET * cost(fitting[-1]) if fitting else 0
    failure = None
    with Journal(journal, results_depend_on) as book, progress_bar(total, progress and rank == 0) as bar:
        bar.update(sum(cost(key[0]) * sum(map(len, result.values())) for key, result in book.done.items() if key[1:]))
        entries = book.done
        try:
            with evaluating(model):
                work = Measurement(model, samples, bos, eos, tokens_per_pass, book, bar, cost)
                if protocol == "reference":
                    for length in mine:
                        work.measure(length, 0, repeats)
                elif protocol == "nested":
                    if mine and fitting:
                        work.measure_nested(fitting, mine)
                else:
                    entries = measure_adaptively(work, fitting, repeats, confidence, rank, processes)
        except BaseException as error:
            failure = error
    if processes > 1 and protocol != "adaptive" and not isinstance(failure, KeyboardInterrupt):
        entries, failure = exchange(entries, failure, processes)
    points, missing = tally(entries, samples)
    missing |= {length: f"beyond the model's {limit} positions" for length in lengths if length not in fitting}
    curve = ForgettingCurve(points, settings, missing)
    if failure is None and fitting != lengths:
        length = lengths[len(fitting)]
        failure = PositionLimitError(
            f"length {length} needs an input of {input_tokens(length)} tokens, and the model's position table ends at "
            f"{limit}. The longest measurable length is {longest_length(limit)}; the curve up to there has been measured.",
            limit,
        )
    if failure is None:
        return curve
    failure.curve = curve
    if hasattr(failure, "add_note"):  # Python 3.11
        failure.add_note(
            f"{len(curve.points)} of {len(lengths)} lengths had been measured: they are in this error's .curve."
        )
    raise failure


def measure_adaptively(
    work: Measurement, lengths: Sequence[int], repeats: int, confidence: float, rank: int, processes: int
) -> dict:
    """Measure where `locate` wants to; each process measures some of the repeats of every point. Returns all entries.

    Above a length that memory is short for, nothing is measured.
    """

    class TooLong(Exception):
        pass

    entries = dict(work.journal.done)

    def measure(length, first, stop):
        nonlocal entries
        a, b = (first + (stop - first) * i // processes for i in (rank, rank + 1))
        failure = None
        try:
            if a < b:
                work.measure(length, a, b)
        except Exception as error:
            failure = error
        if processes > 1:
            entries, failure = exchange(work.journal.done, failure, processes)
        else:
            entries = dict(work.journal.done)
        if failure is not None:
            raise failure
        points, missing = tally({key: value for key, value in entries.items() if key[0] == length}, work.samples)
        if missing:
            raise TooLong(length)
        (point,) = points
        return point.first(stop)

    while lengths:
        try:
            locate(lengths, measure, repeats=repeats, confidence=confidence)
            break
        except TooLong as error:
            lengths = [length for length in lengths if length < error.args[0]]
    return entries


def place_of(model: nn.Module) -> tuple[int, int]:
    """Number of this process and of all that share the work: (0, 1) unless each has the whole model to itself."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):  # tensor parallel or FSDP
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def share_of(lengths: Sequence[int], cost: Callable[[int], float], rank: int, processes: int) -> list[int]:
    """The lengths that one of several processes measures: the costliest are dealt out first, to who has least to do."""
    loads, shares = [0.0] * processes, [[] for _ in range(processes)]
    for length in sorted(lengths, reverse=True):
        least = loads.index(min(loads))
        loads[least] += cost(length)
        shares[least].append(length)
    return sorted(shares[rank])


def exchange(entries: dict, failure: BaseException | None, processes: int) -> tuple[dict, BaseException | None]:
    """What all processes measured, and a failure if one of them had one."""
    everyone = [None] * processes
    torch.distributed.all_gather_object(everyone, (entries, repr(failure) if failure else None))
    for rank, (_, theirs) in enumerate(everyone):
        if theirs and failure is None:
            failure = RuntimeError(f"process {rank} failed: {theirs}")
    return {key: result for entries, _ in everyone for key, result in entries.items()}, failure


def reading_cost(model: nn.Module) -> Callable[[int], float]:
    """A function of the length: how long reading an input takes, in tokens of a short one.

    Attention to n tokens before costs n / (parameters / (layers * width)) as much as all matrix products of a token.
    """
    config = text_config(model)
    embedded = sum(p.numel() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
    others = max(sum(p.numel() for p in model.parameters()) - embedded, 1)
    attends = getattr(config, "num_attention_heads", None) is not None
    width = config.num_hidden_layers * config.hidden_size if attends else 0
    return lambda length: input_tokens(length) * (1 + input_tokens(length) * width / others)


def progress_bar(total: float, show: bool, name: str = "forgetting curve") -> tqdm:
    """Of work, so that the time left is right although long inputs are slow."""
    form = "{l_bar}{bar}| {elapsed}<{remaining}"
    return tqdm(desc=name, total=total, bar_format=form, smoothing=0, disable=not show)


# What a configuration says of where it came from and how it is run, not of what it computes: the journal's settings have
# dtype and attention.
VOLATILE = {"_name_or_path", "backbone_name_or_path", "transformers_version", "architectures", "auto_map"}
VOLATILE |= {"dtype", "torch_dtype", "_attn_implementation", "attn_implementation", "use_cache"}


def identity(model: nn.Module) -> dict[str, str]:
    """What tells a model from another of the same name, for the settings of a journal."""
    if isinstance(model, EndpointModel):
        return {"endpoint": model.base_url}
    return {"weights_sha256": weights_hash(model)}


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over the configuration, and over name, shape and up to 64 values of every parameter: enough to tell two
    models apart, also those that differ in the base of RoPE, a window or a scale only."""

    def lasting(value):
        if isinstance(value, dict):
            return {str(key): lasting(entry) for key, entry in value.items() if key not in VOLATILE}
        return [lasting(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    config = model.config.to_dict() if hasattr(model.config, "to_dict") else vars(model.config)
    found = hashlib.sha256(json.dumps(lasting(config), sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta" and parameter.numel():
            values = parameter.detach().flatten()
            found.update(values[:: max(1, len(values) // 64)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def model_settings(model: nn.Module) -> dict:
    """What a result says about its model."""
    if isinstance(model, EndpointModel):
        return {"model": model.model, "dtype": None, "attention": None, "served_with": model.form}
    return {
        "model": getattr(model.config, "_name_or_path", None) or type(model).__name__,
        "dtype": str(first_parameter(model).dtype).removeprefix("torch."),
        "attention": getattr(text_config(model), "_attn_implementation", None),
    }


def versions() -> dict[str, str]:
    return {"hf-longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def vocabulary_size(model: nn.Module) -> int:
    """How many ids the model can embed."""
    with suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings().num_embeddings
    return text_config(model).vocab_size


def special_ids(model: nn.Module, bos: int | None, eos: int | None, vocab_size: int) -> tuple[int, int]:
    """BOS and EOS as given, or else as the model's configurations say, each standing in for the other if missing.

    Raises:
        ValueError: there is neither, or one is not in the vocabulary.
    """

    def configured(name):
        for config in (text_config(model), getattr(model, "generation_config", None)):
            value = getattr(config, name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value  # chat models list several EOS ids

    bos = configured("bos_token_id") if bos is None else bos
    eos = configured("eos_token_id") if eos is None else eos
    if bos is None and eos is None:
        raise ValueError(
            "the model's configuration has neither a BOS nor an EOS token, and the protocol puts one before each "
            "text. Name one: bos_token_id=..., any id that separates documents in the training data."
        )
    bos, eos = (eos if bos is None else bos), (bos if eos is None else eos)
    for name, value in (("bos_token_id", bos), ("eos_token_id", eos)):
        if not 0 <= value < vocab_size:
            raise ValueError(f"{name} is {value}, but the model's vocabulary has {vocab_size} ids.")
    return bos, eos


POSITION = re.compile(r"(^|_)(wpe|pos|position|positions|positional)(_|$)")
NOT_OF_TEXT = re.compile(r"(^|[._])(rel|relative|rotary|vision|visual|image|audio|patch)([._]|$)")


def position_limit(model: nn.Module) -> int | None:
    """How many tokens fit into the model's table of absolute positions, or into what is served; None if any number do.

    Looks for the table itself, learned or fixed, because `max_position_embeddings` is the end of one in some models
    (GPT-2, OPT) and only a claim in others (rotary, ALiBi). A model that `reads_in_segments` uses the table for one
    segment at a time, so it limits no input.
    """
    if getattr(model, "reads_in_segments", False):
        return None

    if isinstance(model, EndpointModel):
        return model.position_limit

    def named(items):
        return (x for name, x in items if POSITION.search(name.rpartition(".")[2]) and not NOT_OF_TEXT.search(name))

    limits = []
    for table in named(model.named_modules()):
        if isinstance(table, nn.Embedding):
            # OPT and BART keep their first rows free, as .offset says; RoBERTa starts after its padding row
            start = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
            limits.append(table.num_embeddings - start)
    for table in named((*model.named_parameters(), *model.named_buffers())):
        if table.is_floating_point() and table.ndim > 1:  # (..., positions, width), as in GPT-J and CTRL
            limits.append(table.shape[-2])
    return min(limits, default=None)


def warn_beyond_claim(model: nn.Module, lengths: Sequence[int]) -> None:
    """Warn once if inputs get longer than the positions a model without a position table claims to support."""
    claim = claimed_context(model)
    if claim is not None and input_tokens(lengths[-1]) > claim:
        warnings.warn(
            f"lengths above {longest_length(claim)} need more than the {claim} positions (max_position_embeddings) "
            "that the model claims to support. They are measured all the same.",
            stacklevel=3,
        )


def on_cpu(ids):
    return ids.cpu() if isinstance(ids, torch.Tensor) else ids
