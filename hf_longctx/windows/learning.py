"""Learn a window for each key head of a frozen model.

A window is the first `sinks` keys and the last 2^4, 2^5, ... keys, or all keys. The forward pass uses one window in
each head, as a cache does. The loss is the Kullback-Leibler divergence of the model without windows and the model with
them. The gradient is the first-order effect of every window on the loss, whether it is used or not
(`mixed_attention`).

The value of the keys that a larger window adds is the absolute difference between the effects of the two windows. The
sign is ignored: where effects are small, it is noise, and windows would close by chance. Each step averages the values
with those of earlier steps. It then chooses windows with a large sum of values that fit into a share of the cache. A
head that closes although the model needs it has large values in the next step, and can open again.
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
from .head_windows import HeadWindows
from .layers import attention_layers, key_heads, own_window
from .mixed_attention import mixed_attention


SMALLEST = 4  # log2 of the smallest window
START = 2  # the share of the cache is limited to this multiple of its target, and the limit falls
FALL = 1 / 3  # part of the steps in which the limit falls to the target
NAME = "head_windows_learning"


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, s_aux=None, **kwargs):
    """Attend with the weights of windows that `WindowLearner` sets, or without windows if it sets none."""
    check_options(kwargs)
    weights = module.window_weights
    if weights is None:
        options = {"dropout": dropout, "scaling": scaling, "s_aux": s_aux, **kwargs}
        return plain_attention(module, query, key, value, attention_mask, **options), None
    if (own := kwargs.get("sliding_window")) is not None and own < query.shape[2]:
        raise NotImplementedError(f"windows cannot be learned in a layer with a sliding window of its own, got {own}.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights, sizes, sinks = weights
    output = mixed_attention(query, key, value, weights, sizes, sinks=sinks, scale=scale, extra_logits=s_aux)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class WindowLearner(nn.Module, ModuleUtilsMixin):
    """A frozen model with learnable windows. Its state dict contains the windows and their values only.

    Args:
        model: a causal language model. Its attention implementation is replaced until `release` is called.
        max_length: T, tokens of a training sequence, a power of two. Windows are shorter, or are all keys.
        keep: target share of the cache, above 0 and below 1.
        keep_context: number of tokens at which the cache has this share, at least T.
        sinks: number of first tokens that every head keeps.

    Attributes:
        weights: (layers, Hkv, W) float32, 1 for the chosen window of a head and 0 for the others. Layers with sliding
            windows of their own are not learned.
        values: (layers, Hkv, W) float32, moving average of the windows' values, ascending along W.

    Raises:
        ValueError: an argument is not as above.
        NotImplementedError: head windows do not support the model's attention.
    """

    model: Any
    weights: nn.Parameter
    values: Tensor

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
        self.keep, self.sinks = keep, sinks
        self.context = keep_context
        own = [own_window(layer, keep_context) for layer in self.layers]  # these layers keep their windows
        self.learned = [index for index, window in enumerate(own) if window is None]
        if not self.learned:
            raise NotImplementedError("`model` must have layers with full attention; all of its layers have windows.")
        heads, device = key_heads(self.layers[0]), next(model.parameters()).device
        self.sizes = 2 ** torch.arange(SMALLEST, max_length.bit_length())  # the largest is all keys
        self.shares = (self.sizes.double() + sinks) / keep_context  # of the context
        self.shares[-1] = 1
        # keys that the model's full cache stores, in units of the context
        self.stored = heads * sum(min(window or keep_context, keep_context) / keep_context for window in own)
        self.weights = nn.Parameter(torch.zeros(len(self.learned), heads, len(self.sizes), device=device))
        self.register_buffer("values", torch.zeros_like(self.weights))
        # All heads start with half of a sequence. The heads that retrieve then open, because the loss is large.
        self.choose(torch.full(self.weights.shape[:2], len(self.sizes) - 2))
        smallest = self.share(torch.zeros_like(self.chosen()))
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
            layer.window_weights = None

    def train(self, mode: bool = True) -> "WindowLearner":
        """Do nothing: the model stays in evaluation mode, without dropout."""
        return self

    def release(self) -> Any:
        """Restore the model's attention implementation, and return the model."""
        self.model.set_attn_implementation(self.before)
        return self.model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the windows and their values. The model is not saved, because it does not change."""
        return {kwargs.get("prefix", "") + name: getattr(self, name).detach() for name in ("weights", "values")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the windows and their values."""
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
        found = self.log_probs(input_ids, positions, self.weights)
        divergence = (expected.exp() * (expected - found)).sum(-1)[scored[:, positions]].mean()
        return {"loss": divergence}

    def log_probs(self, input_ids: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the log-probabilities at some positions, (B, n, V) float32, of the model with windows or without."""
        sizes = self.sizes.to(input_ids.device)
        for index, layer in enumerate(self.learned):
            self.layers[layer].window_weights = None if weights is None else (weights[index], sizes, self.sinks)
        logits = self.model(input_ids, logits_to_keep=positions, use_cache=False).logits
        return F.log_softmax(logits.float(), -1)

    def chosen(self) -> Tensor:
        """Return the index of each head's window in `sizes`, (layers, Hkv)."""
        return self.weights.detach().argmax(-1).cpu()

    @torch.no_grad()
    def choose(self, chosen: Tensor) -> None:
        """Set the window of each head to an index in `sizes`, (layers, Hkv)."""
        self.weights.copy_(F.one_hot(chosen, len(self.sizes)))

    def share(self, chosen: Tensor) -> float:
        """Return the share of the model's cache that windows keep in the context."""
        return 1 - (1 - self.shares[chosen]).sum().item() / self.stored

    def best(self, share: float) -> Tensor:
        """Return windows with a large sum of values within a share of the model's cache.

        This is the greedy algorithm for the multiple-choice knapsack problem: the head whose larger window has the
        largest value per added key grows next. The sum is below the largest possible one by at most the difference
        between two values of one head. Values are estimates, and windows that differ in a third of the heads can have
        almost the same sum. In one run of each of three models, windows with the largest sum did not retain more.

        Returns:
            Indices in `sizes`, (layers, Hkv).
        """
        values = self.values.double().cpu().flatten(0, 1)
        heads = torch.arange(len(values))
        best = torch.zeros_like(heads)
        left = self.stored * (share - self.share(best))
        while True:
            costs = self.shares - self.shares[best, None]
            gains = (values - values[heads, best, None]) / costs
            gains[(costs <= 0) | (costs > left)] = -torch.inf
            head, size = divmod(int(gains.argmax()), len(self.sizes))
            if gains[head, size] == -torch.inf:
                return best.view(self.weights.shape[:2])
            left -= costs[head, size].item()
            best[head] = size

    def windows(self) -> HeadWindows:
        """Return the chosen windows, and -1 for the layers that are not learned."""
        windows = torch.full((len(self.layers), self.weights.shape[1]), -1)
        sizes = self.sizes.clone()
        sizes[-1] = -1
        windows[self.learned] = sizes[self.chosen()]
        return HeadWindows(windows, self.sinks, self.layers[0].config.model_type)


class WindowOptimizer(torch.optim.Optimizer):
    """Choose the windows of a `WindowLearner` in each step. See the module docstring.

    Args:
        params: the learner's weights, or groups of parameters.
        learner: the learner.
        steps: number of steps. In the first third, the share of the cache falls to its target.
        lr: a step has the weight max(lr, 1 / step) in the moving average of the values.
    """

    def __init__(self, params: Any, learner: WindowLearner, steps: int, lr: float):
        super().__init__(params, {"lr": lr})
        self.learner, self.steps = learner, steps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Average the values, and choose the windows."""
        weights = self.learner.weights
        assert weights.grad is not None
        effects = weights.grad.diff(dim=-1, prepend=weights.grad[..., :1]).abs()
        total = effects.sum().clamp(min=torch.finfo(effects.dtype).tiny)
        values = effects.cumsum(-1) / total  # all steps have values of the same size
        state = self.state[weights]
        step = state["step"] = state.get("step", 0) + 1
        self.learner.values.lerp_(values, max(self.param_groups[0]["lr"], 1 / step))
        target = self.learner.keep
        excess = (min(START * target, 1) - target) * max(1 - step / (FALL * self.steps), 0)
        self.learner.choose(self.learner.best(target + excess))


__all__ = ["WindowLearner", "WindowOptimizer"]
