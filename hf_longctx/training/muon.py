"""Muon for the matrices of a model, and AdamW for all else, as one optimizer."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..fox.modeling_fox import FoxForgetGate


class MuonAndAdamW(Optimizer):
    """`torch.optim.Muon` on the matrices of hidden layers, and the AdamW of Trainer on the other parameters.

    The learning rate is that of AdamW: an update of Muon is scaled to the size of one of AdamW
    (`adjust_lr_fn="match_rms_adamw"`, arXiv 2502.16982).

    Args:
        adamw: with all parameters. Its groups are divided, and keep their weight decay.
        matrices: the parameters for Muon.

    Raises:
        ImportError: torch is older than 2.9.
    """

    def __init__(self, adamw: Optimizer, matrices: list[nn.Parameter]):
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"--optimizer muon needs torch 2.9 or newer; this is {torch.__version__}.")
        self.muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], adjust_lr_fn="match_rms_adamw")
        self.adamw, identities, groups = adamw, {id(p) for p in matrices}, []
        settings = {name: value for name, value in self.muon.defaults.items() if name not in ("lr", "weight_decay")}
        for group in adamw.param_groups:
            for by_muon in (True, False):
                params = [p for p in group["params"] if (id(p) in identities) == by_muon]
                options = group | settings if by_muon else group
                groups += [options | {"params": params, "by_muon": by_muon}] if params else []
        super().__init__(groups, adamw.defaults | {"by_muon": False})

    def step(self, closure: Any = None) -> None:
        part: Any
        for part, by_muon in ((self.muon, True), (self.adamw, False)):  # a loaded checkpoint has replaced the groups
            part.state, part.param_groups = self.state, [g for g in self.param_groups if g["by_muon"] == by_muon]
            part.step()


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Return what Muon trains: matrices, but for those of embeddings, the head and forget gates."""
    apart = [model.get_input_embeddings(), model.get_output_embeddings()]
    apart += [module for module in model.modules() if isinstance(module, (nn.Embedding, FoxForgetGate))]
    others = {id(p) for module in apart if module is not None for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in others]
    return [p for p in trained if p.ndim == 2 and min(p.shape) > 1]


__all__ = ["MuonAndAdamW", "hidden_matrices"]
