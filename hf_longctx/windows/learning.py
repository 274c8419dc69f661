"""Learn a window for each key head of a frozen model.

The forward pass uses windows as a cache does: a head keeps its first `sinks` keys and its last `window` keys. The loss
is the Kullback-Leibler divergence of the model without windows and the model with windows, plus a price on the share
of the cache that the windows keep. The price rises while the share is above its target (dual ascent).

The windows of a head are 2^4, 2^5, ..., and all keys. The parameter is the base-2 logarithm of the window. Between two
windows, the loss and the price are interpolated linearly: the keys that only the larger window keeps get a weight. The
forward pass rounds this weight to 0 or 1, and its gradient passes through the rounding (a straight-through estimate).
This requires the effect of each dropped key, which `distance_attention` computes.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ModuleUtilsMixin

from .attention import attention as plain_attention
from .attention import check_options
from .distance_attention import distance_attention
from .head_windows import HeadWindows
from .layers import attention_layers, key_heads


SMALLEST = 4  # log2 of the smallest window
AVERAGE = 0.2  # weight of a step in the moving average of the windows
DUAL_RATE = 0.3  # relative change of the price in a step if the share differs from `keep` by keep (1 - keep)
PRICE = 0.3  # price at the start, in nats for the whole cache
PRICES = (1e-5, 5.0)  # range of the price
NAME = "head_windows_learning"


def attention(module, query, key, value, attention_mask, scaling=None, s_aux=None, **kwargs):
    """Attend with the weights of distances that `WindowLearner` sets, or without windows if it sets none."""
    check_options(kwargs)
    weights = module.distance_weights
    if weights is None:
        options = {"scaling": scaling, "s_aux": s_aux, **kwargs}
        return plain_attention(module, query, key, value, attention_mask, **options), None
    if (own := kwargs.get("sliding_window")) is not None and own < query.shape[2]:
        raise NotImplementedError(f"windows cannot be learned in a layer with a sliding window of its own, got {own}.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = distance_attention(
        query, key, value, weights, sinks=module.distance_sinks, scale=scale, extra_logits=s_aux
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def own_window(layer: Any, context: int) -> int | None:
    """Return the sliding window of a layer. None: it has none, or none that is shorter than the context."""
    window = getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None))
    return None if window is None or window >= context else window


class WindowLearner(nn.Module, ModuleUtilsMixin):
    """A frozen model with learnable windows. Its state dict contains the windows and their price only.

    Args:
        model: a causal language model. Its attention implementation is replaced until `release` is called.
        max_length: T, tokens of a training sequence, a power of two. Windows are shorter, or are all keys.
        keep: target share of the cache, above 0 and below 1.
        keep_context: number of tokens at which the cache has this share, at least T.
        sinks: number of first tokens that every head keeps.

    Raises:
        ValueError: an argument is not as above.
        NotImplementedError: head windows do not support the model's attention.
    """

    model: Any
    log2_windows: nn.Parameter
    average: Tensor
    price: Tensor

    def __init__(self, model: Any, max_length: int, keep: float, keep_context: int, sinks: int = 4):
        super().__init__()
        self.layers = attention_layers(model)
        shortest = 2 ** (SMALLEST + 2)
        if max_length < shortest or max_length.bit_count() != 1:
            nearest = max(shortest, 1 << max(max_length, 1).bit_length() - 1)
            raise ValueError(
                f"`max_length` must be a power of two of at least {shortest}, got {max_length}. Give --max_length "
                f"{nearest}."
            )
        if not 0 < keep < 1:
            raise ValueError(f"`keep` must be above 0 and below 1, got {keep}. Give --keep 0.25 for a quarter.")
        if keep_context < max_length:
            raise ValueError(
                f"`keep_context` must be at least `max_length` ({max_length}), got {keep_context}. Give a larger "
                "--keep_context or a smaller --max_length."
            )
        self.model, self.config = model, model.config
        self.length, self.keep, self.context, self.sinks = max_length, keep, keep_context, sinks
        self.sliding = [own_window(layer, keep_context) for layer in self.layers]  # these layers keep their windows
        learned = [index for index, window in enumerate(self.sliding) if window is None]
        if not learned:
            raise NotImplementedError("`model` must have layers with full attention; all of its layers have windows.")
        self.learned = learned
        self.open = math.log2(max_length)  # log2 of a window that is all keys
        heads = key_heads(self.layers[0])
        # keys that the model's full cache stores, in units of the context
        self.stored = heads * sum(min(window or keep_context, keep_context) / keep_context for window in self.sliding)
        device = next(model.parameters()).device
        # All heads start with half of a sequence. The heads that retrieve then open, because the loss is large.
        self.log2_windows = nn.Parameter(torch.full((len(learned), heads), self.open - 1, device=device))
        self.register_buffer("average", self.log2_windows.detach().clone())
        self.register_buffer("price", torch.tensor(PRICE, device=device))
        smallest = self.share(torch.full_like(self.average, SMALLEST))
        if keep < smallest:
            raise ValueError(
                f"`keep` must be at least {math.ceil(1e4 * smallest) / 1e4} for this model, got {keep}. Layers with sliding "
                f"windows of their own, and windows of {2**SMALLEST} tokens in all other layers, need this share. Give a "
                "larger --keep or a larger --keep_context."
            )
        model.requires_grad_(False)
        self.before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        for layer in self.layers:
            layer.distance_weights, layer.distance_sinks = None, sinks

    def train(self, mode: bool = True) -> "WindowLearner":
        """Do nothing: the model stays in evaluation mode, without dropout."""
        return self

    def release(self) -> Any:
        """Restore the model's attention implementation, and return the model."""
        self.model.set_attn_implementation(self.before)
        return self.model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the windows and their price. The model is not saved, because it does not change."""
        prefix = kwargs.get("prefix", "")
        names = ("log2_windows", "average", "price")
        return {prefix + name: getattr(self, name).detach() for name in names}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load windows and their price."""
        for name, value in state_dict.items():
            getattr(self, name).data.copy_(value)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss.

        Args:
            input_ids: (B, T), documents without padding.
            labels: (B, T), -100 where the token's distribution is not compared.
        """
        scored = labels[:, 1:] != -100
        positions = scored.any(0).nonzero()[:, 0]
        with torch.no_grad():
            expected = self.log_probs(input_ids, positions)
        found = self.log_probs(input_ids, positions, self.weights())
        divergence = (expected.exp() * (expected - found)).sum(-1)[scored[:, positions]].mean()
        loss = divergence + self.price * self.interpolated_shares().mean()
        return {"loss": loss, "divergence": divergence.detach()}

    def log_probs(self, input_ids: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the log-probabilities at some positions, (B, n, V) float32, of the model with windows or without."""
        for index, layer in enumerate(self.learned):
            self.layers[layer].distance_weights = None if weights is None else weights[index]
        logits = self.model(input_ids, logits_to_keep=positions, use_cache=False).logits
        return F.log_softmax(logits.float(), -1)

    def weights(self) -> Tensor:
        """Return the weight of each distance, (layers, Hkv, T): 0 or 1, with the gradient of the interpolation."""
        distance = torch.arange(self.length, device=self.log2_windows.device)
        size = self.log2_windows[..., None]
        hard = (distance < 2 ** size.detach().round()).float()
        below = size.detach().floor().clamp(SMALLEST, self.open - 1)
        between = distance.clamp(min=1).log2().floor() == below  # keys that only the larger of two windows keeps
        return hard + between * (size - size.detach())

    def shares(self, log2_windows: Tensor) -> Tensor:
        """Return the share of the context that windows keep in each head. These windows are integers."""
        kept = torch.where(log2_windows >= self.open, float(self.context), 2**log2_windows + self.sinks)
        return kept / self.context

    def share(self, log2_windows: Tensor) -> float:
        """Return the share of the model's cache that rounded windows keep in the context."""
        return self.share_of_model(self.shares(log2_windows.round().clamp(SMALLEST, self.open)))

    def share_of_model(self, shares: Tensor) -> float:
        """Return the share of the model's cache that is kept if the learned heads keep these shares of the context."""
        return 1 - (1 - shares.cpu().double()).sum().item() / self.stored

    def interpolated_shares(self) -> Tensor:
        """Return the share of the context that each learned head keeps, interpolated between two windows."""
        below = self.log2_windows.detach().floor().clamp(SMALLEST, self.open - 1)
        low, high = self.shares(below), self.shares(below + 1)
        return low + (self.log2_windows - below) * (high - low)

    @torch.no_grad()
    def end_step(self) -> None:
        """Average the windows and change the price, after a step of the optimizer."""
        self.log2_windows.clamp_(SMALLEST, self.open)
        self.average.lerp_(self.log2_windows, AVERAGE)
        share = self.share_of_model(self.interpolated_shares())  # reacts before a rounded window changes
        excess = (share - self.keep) / (self.keep * (1 - self.keep))
        factor = math.exp(min(DUAL_RATE * excess, math.log(PRICES[1] / PRICES[0])))  # a larger one could overflow
        self.price.mul_(factor).clamp_(*PRICES)

    @torch.no_grad()
    def result(self) -> Tensor:
        """Return the logarithms of the learned windows: the averages plus one summand, rounded.

        The summand rises until the share reaches its target. A window that would then exceed the target does not grow.
        """
        average = self.average.cpu().double()
        sizes = torch.full_like(average, SMALLEST)
        while True:
            larger = (sizes + 1).clamp(max=self.open)
            costs = (self.shares(larger) - self.shares(sizes)) / self.stored
            fits = (costs > 0) & (self.share(sizes) + costs <= self.keep)
            if not fits.any():
                return sizes
            sizes.view(-1)[torch.where(fits, average - sizes, -torch.inf).argmax()] += 1

    def windows(self, log2_windows: Tensor) -> HeadWindows:
        """Return the windows of all layers for the logarithms of those of the learned layers, (layers, Hkv)."""
        sizes = log2_windows.round().clamp(SMALLEST, self.open).long().cpu()
        windows = torch.full((len(self.layers), sizes.shape[1]), -1)
        windows[self.learned] = torch.where(sizes >= self.open, -1, 2**sizes)
        return HeadWindows(windows, self.sinks, self.layers[0].config.model_type)


__all__ = ["WindowLearner"]
