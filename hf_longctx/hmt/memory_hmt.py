"""The parameters that HMT adds to a backbone: `HMTMemory`. Symbols follow arXiv 2405.06067, sec. 3."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


# Gain of the initial projections in paper mode: the initial scores are gain^2 q.c / sqrt(h). After the final norm, the
# entries of memories are of order 1, so q.c / sqrt(h) is about sqrt(d) * cosine: sharp enough to select a memory, and
# soft enough for gradients.
SIMILARITY_GAIN = 1.5
# With c memories, initial scale-free scores are log(1 + c) * cosine / TEMPERATURE. If c = 10, this is cosine / 0.1.
TEMPERATURE = 0.25
# If the squared norm of a difference is below this fraction of |x|^2, `normalize` does not scale it up to length one.
FLOOR = 1e-4


class HMTMemory(nn.Module):
    """The parameters that HMT adds to a backbone: learned prompts, two recall projections and a temperature.

    They are not in an nn.Linear, so quantization and LoRA with target_modules="all-linear" do not change them.

    Args:
        width: d, width of memory and input embeddings.
        memory_tokens: m, number of embeddings per memory.
        recall_dim: h, output width of the recall projections. None: no recall and no projections.
        single_pass: whether the model uses single-pass mode.
        settings: function that returns the model's settings. A PEFT adapter of the memory contains these settings.

    Parameters: `initial` (m, d), the prompt of the first segment (paper mode only); `summary_token` (1, d), the
    paper's H^T, which ends both parts of a segment in single-pass mode; `wq`, `wk` (h, d); `log_temperature` (1,), the
    temperature of scale-free scores (single-pass mode only).
    """

    def __init__(
        self,
        width: int,
        memory_tokens: int,
        recall_dim: int | None,
        single_pass: bool = False,
        settings: Callable[[], dict] = dict,
    ):
        super().__init__()
        self.settings = settings
        self.single_pass = single_pass
        if not single_pass:
            self.initial = nn.Parameter(torch.empty(memory_tokens, width))
        if single_pass or recall_dim is not None:
            self.summary_token = nn.Parameter(torch.empty(1, width))
        if recall_dim is not None:
            self.wq = nn.Parameter(torch.empty(recall_dim, width))
            self.wk = nn.Parameter(torch.empty(recall_dim, width))
            if single_pass:
                self.log_temperature = nn.Parameter(torch.empty(1))  # FSDP2 does not support scalar parameters

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call a function that uses the parameters. Inside `forward`, accelerate loads them if they are offloaded."""
        return function()

    def get_extra_state(self) -> Tensor:
        """Return the settings of the model as JSON bytes, (n,), uint8."""
        return torch.tensor(list(json.dumps(self.settings()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the settings saved with the weights differ from the settings of this model."""
        saved, own = json.loads(bytes(state.tolist())), self.settings()
        differing = {name: value for name, value in saved.items() if own.get(name) != value}
        if differing:
            raise ValueError(
                f"The memory weights were trained with {differing}, and this model has "
                f"{ {name: own.get(name) for name in differing} }. Load them into a model with the same settings. "
                "Some settings can be changed afterwards with model.configure."
            )

    def scores(self, query: Tensor, bank: Tensor, valid: Tensor) -> Tensor:
        """Return the scores before the softmax, q Wq^T (C Wk^T)^T / sqrt(h), as (B, c). See `recall` for arguments.

        Single-pass mode uses scale-free scores: log(1 + count) u(q) Wq^T (u(C) Wk^T)^T / temperature. Here, `count`
        is the number of memories of a row, and u(x) normalizes x minus the mean of these memories to length one.
        """
        wq, wk = self.wq.to(bank), self.wk.to(bank)
        factor: Any = wq.shape[0] ** -0.5
        if self.single_pass:
            count = valid.sum(1)
            origin = (bank * valid[..., None]).sum(1, keepdim=True) / count.clamp(min=1)[:, None, None]
            query, bank = normalize(query, origin), normalize(bank, origin)
            factor = count.to(bank).log1p()[:, None, None] * (-self.log_temperature.to(bank)).exp()
        # (q Wq^T) Wk takes 2 h d products in total; keys C Wk^T would take h d products for each memory.
        return (query @ wq.mT @ wk * factor @ bank.mT).squeeze(1)

    def recall(self, query: Tensor, bank: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the remembered segments (paper, sec. 3.2): softmax(scores) C.

        Hidden states of a pretrained backbone share a large common component, and their norm depends on the backbone.
        Scale-free scores do not depend on either. With more memories than in training, the softmax would lower the
        weight of the best memory. The factor log(1 + count) prevents this (arXiv 2501.19399, eq. 2).

        Args:
            query: summary of the current segment, (B, 1, d).
            bank: memory embeddings C, oldest first, (B, c, d).
            valid: (B, c), bool, False where a row does not have the memory.

        Returns:
            The prompt, (B, 1, d), in bank.dtype, and the weights softmax(scores), (B, c), in at least fp32. Weights
            are 0 where `valid` is False. In a row without memories, the prompt and the weights are 0.
        """
        with torch.autocast(query.device.type, enabled=False):
            bank_wide = bank.to(torch.promote_types(bank.dtype, torch.float32))
            scores = self.scores(query.to(bank_wide), bank_wide, valid)
            scores = scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(-1) * valid
            prompt = (scores[:, None] @ bank_wide).to(bank.dtype)
        return prompt, scores


def normalize(x: Tensor, origin: Tensor) -> Tensor:
    """Normalize `x - origin` to length one. If this difference is tiny compared with x, the length is below one."""
    rest = x - origin
    return rest * (rest.square().sum(-1, keepdim=True) + FLOOR * x.square().sum(-1, keepdim=True) + 1e-30).rsqrt()
