"""Memory of a training step, estimated from configuration alone, before any weight is loaded.

A step runs on tensors without data (PyTorch's fake tensors): model, adapter and loss are those of the run, and what is
alive at a time is counted. A process holds more: its libraries, and on a CPU what the C library keeps of the memory
that was freed. glibc keeps pieces that are smaller than a threshold, which grows up to 32 MB unless it is set.
"""

import dataclasses
import math
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.generic import is_flash_attention_requested

from ..fox.modeling_fox import FoxForgetGate
from ..hmt import HMTConfig, HMTWrapper
from .adapters import add_lora
from .loss_in_pieces import LossInPieces, fits
from .model_init import base_dtype, in_bfloat16, planned_config
from .muon import hidden_matrices
from .recipes import ResolvedFinetuning, ResolvedSettings, RunSettings
from .settings import option


GB = 1e9
BYTES_IN_4BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # a scale of 8 bits for 64 weights, and one of 32 for 256 of these
# Checks of the input find nothing, and the trial of the loss in pieces succeeds.
ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0, torch.ops.aten.allclose.default: True}
KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer", "logits", "activations")


@dataclasses.dataclass
class Estimate:
    """Bytes that are alive when a step takes most, by what they are for; `activations` is all the rest."""

    weights: int
    gradients: int
    optimizer: int
    logits: int
    activations: int

    @property
    def peak(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and keeps the counts of the moment with the most.

    Attributes:
        kind: what new tensors are for.
        vocab_size: a tensor with so many columns holds logits.
    """

    def __init__(self):
        super().__init__()
        self.now, self.most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self.kind, self.vocab_size, self.known = "weights", 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ANSWERS:  # asks for values, which are not there
            return ANSWERS[func]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        if storage._cdata in self.known:
            return
        is_logits = self.kind == "activations" and tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size
        kind, size = "logits" if is_logits else self.kind, storage.nbytes()
        self.known.add(storage._cdata)
        weakref.finalize(storage, self.remove, storage._cdata, kind, size)
        self.now[kind] += size
        if sum(self.now.values()) > sum(self.most.values()):
            self.most = dict(self.now)

    def remove(self, address: int, kind: str, size: int) -> None:
        self.known.remove(address)
        self.now[kind] -= size

    def is_gradient(self, parameter: torch.Tensor) -> None:
        """Count the gradient that a parameter has got as one; it leaves with the others, at the end of the step."""
        assert parameter.grad is not None
        size = parameter.grad.untyped_storage().nbytes()
        self.now["activations"] -= size
        self.now["gradients"] += size


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is quantized, and made whole for each product."""

    def __init__(self, linear: nn.Linear, bytes_per_weight: float, dtype: torch.dtype):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        size = math.ceil(linear.weight.numel() * bytes_per_weight)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.bias, self.dtype = linear.bias, dtype

    def forward(self, input):
        result: Any = QuantizedProduct.apply(input.to(self.dtype), self.out_features)
        return result if self.bias is None else result + self.bias


class QuantizedProduct(torch.autograd.Function):
    """A product with a weight that is made for it, forward and backward."""

    @staticmethod
    def forward(ctx, x, out_features):
        ctx.size = x.shape[-1]
        return F.linear(x, x.new_empty(out_features, x.shape[-1]))

    @staticmethod
    def backward(ctx, gradient):
        return F.linear(gradient, gradient.new_empty(ctx.size, gradient.shape[-1])), None


def estimate(settings: RunSettings) -> Estimate:
    """Estimate the memory of an optimizer step in one process, without the weights.

    Kernels of other attention implementations than PyTorch's are taken to need what SDPA needs.

    Args:
        settings: of a training, resolved or not. A new model has the vocabulary of its tokenizer.
    """
    run = settings.resolve()
    tokenizer = None if isinstance(run, ResolvedFinetuning) else AutoTokenizer.from_pretrained(run.tokenizer)
    with torch.device("meta"):
        model = make_empty_model(run, tokenizer)
    with FakeTensorMode(), LiveMemory() as memory:
        leave_meta(model)
        config = getattr(model.config, "backbone_config", model.config).get_text_config()
        memory.vocab_size = config.vocab_size
        trained = [p for p in model.parameters() if p.requires_grad]
        if run.activation_checkpointing:
            if hasattr(model, "activation_checkpointing_enable"):
                model.activation_checkpointing_enable(every_n_layers=run.checkpointed_layers)
            else:  # before transformers 5.23 or so
                model.gradient_checkpointing_enable()
        memory.kind = "optimizer"
        optimizer, moments = torch.optim.AdamW(trained), torch.uint8 if "8bit" in run.optimizer else torch.float32
        by_muon = {id(p) for p in hidden_matrices(model)} if run.optimizer == "muon" else set()
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                **{
                    name: torch.empty_like(parameter, dtype=moments)
                    for name in (("momentum",) if id(parameter) in by_muon else ("exp_avg", "exp_avg_sq"))
                },
            }
        optimizer.zero_grad()
        memory.kind = "activations"
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(GradientCounter(memory))
        for _ in range(min(2, run.accumulation(1))):  # the second pass meets the gradients of the first
            pass_through(model, run)
        most = memory.most
    return Estimate(**most)


class GradientCounter:
    """Tells the memory of the gradient of a parameter when it comes, once a step."""

    def __init__(self, memory: LiveMemory):
        self.memory, self.is_counted = memory, False

    def __call__(self, parameter: torch.Tensor) -> None:
        if not self.is_counted:
            self.memory.is_gradient(parameter)
        self.is_counted = True


def make_empty_model(run: ResolvedSettings, tokenizer) -> Any:
    """Return the model of a run, adapter included, with weights that are not filled."""
    config = planned_config(run, tokenizer)
    if not isinstance(run, ResolvedFinetuning):
        return AutoModelForCausalLM.from_config(config).train()
    dtype = base_dtype(run)
    base = AutoModelForCausalLM.from_config(getattr(config, "backbone_config", config), dtype=dtype)
    if run.quantization:
        quantize(base, 1 if run.load_in_8bit else BYTES_IN_4BIT, torch.bfloat16 if in_bfloat16(run) else torch.float32)
    model: Any = base
    if run.recipe == "hmt":
        sizes = {name: getattr(run, name) for name in ("segment_length", "sensory_tokens", "recall_mode")}
        if config.model_type == "hmt":
            config.recall = True  # as in the stage that comes next
        model = HMTWrapper.from_backbone(
            base, config if config.model_type == "hmt" else HMTConfig(**sizes, recall=False)
        )
    for module in model.modules():
        if isinstance(module, FoxForgetGate):
            module.float()
    if run.attention == "eager":
        model.set_attn_implementation("eager")
    if run.adapter is not None:
        adapter: Any = PeftConfig.from_pretrained(run.adapter)
        adapter.inference_mode = False
        return get_peft_model(model, adapter).train()
    return (model if run.full else add_lora(model, run)).train()


def leave_meta(model: Any) -> None:
    """Put new tensors of the CPU, or fake ones, in the place of parameters and buffers; tied ones stay one."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for name, old in place.items():
                if old is not None and id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                place[name] = None if old is None else made[id(old)]


def quantize(model: Any, bytes_per_weight: float, dtype: torch.dtype) -> None:
    """Replace all linear layers but the head, as bitsandbytes does."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                setattr(module, name, QuantizedLinear(child, bytes_per_weight, dtype))


def pass_through(model: Any, run: ResolvedSettings) -> None:
    """Make one forward and backward pass, as the Trainer of the run does."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.zeros(run.per_device_batch_size, run.sequence_length, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "num_items_in_batch": ids.numel()}
    in_pieces: Any = nullcontext()
    if base.config.model_type == "hmt":
        inputs["logits_to_keep"] = 1
        base.lm.can_skip_logits = lambda device: type(base.get_output_embeddings()) is nn.Linear
    elif fits(base):
        in_pieces = LossInPieces(base)
    is_flash = run.attention and is_flash_attention_requested(requested_attention_implementation=run.attention)
    if run.packing and base.config.model_type != "hmt" and not is_flash:  # without: no mask
        inputs["position_ids"] = torch.arange(run.sequence_length).expand_as(ids)
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16(run)), in_pieces:
        loss = model(**inputs, use_cache=False).loss
    loss.backward()


def savings(settings: RunSettings, before: Estimate) -> Iterator[tuple[str, int]]:
    """Yield what would make the peak smaller by a twentieth or more, and by how many bytes."""
    run = settings.resolve()
    changes: dict[str, Any] = {"activation_checkpointing": True, "per_device_batch_size": 1}
    if isinstance(run, ResolvedFinetuning):
        changes |= {"base_dtype": "bfloat16", "load_in_4bit": True}
        if run.full:
            changes = {"activation_checkpointing": True, "per_device_batch_size": 1, "optimizer": "adamw_8bit"}
        elif run.quantization:
            changes = {"activation_checkpointing": True, "per_device_batch_size": 1}
    for name, value in changes.items():
        if getattr(run, name) == value:
            continue
        text = option(name) if value is True else f"{option(name)} {value}"
        saved = before.peak - estimate(dataclasses.replace(settings, **{name: value})).peak
        if saved > before.peak / 20:
            yield text, saved


def report(settings: RunSettings) -> str:
    """Return the estimate as a table, with what would save memory, in GB of 10^9 bytes."""
    found = estimate(settings)
    lines = ["memory of a step in each process, estimated from the configuration:"]
    lines += [f"  {kind:12} {getattr(found, kind) / GB:8.2f} GB" for kind in KINDS]
    lines.append(f"  {'in all':12} {found.peak / GB:8.2f} GB")
    if torch.cuda.is_available():
        lines.append(f"this GPU has {torch.cuda.get_device_properties(0).total_memory / GB:.2f} GB")
    else:
        lines.append("libraries come on top, and what glibc keeps of freed memory: little, if you set")
        lines.append("MALLOC_MMAP_THRESHOLD_=65536 in the environment")
    lines += [f"{change} saves {saved / GB:.2f} GB" for change, saved in savings(settings, found)]
    return "\n".join(lines)


__all__ = ["Estimate", "estimate", "report"]
