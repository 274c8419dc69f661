"""Statistics of the forget gates: the distance that the heads of a FoX remember, measured while the model runs."""

from functools import partial

import torch

from hf_longctx.fox.modeling_fox import FoxForgetGate


QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
OPEN = 1e-12  # least -log f whose decay time float32 can hold


class ForgetGateStatistics:
    """The tokens in which each gate of a model forgets by a factor e, averaged over all tokens that are trained on.

    Forward hooks keep the mean of log f of each gate and pass, which the layers compute anyway.
    """

    def __init__(self, model: torch.nn.Module):
        self.total: dict[str, torch.Tensor] = {}
        self.passes: dict[str, int] = {}
        for name, module in model.named_modules():
            if isinstance(module, FoxForgetGate):
                module.register_forward_hook(partial(self.add, name))

    def add(self, name, module, inputs, log_f):
        if not module.training:  # an evaluation
            return
        self.total[name] = self.total.get(name, 0) + log_f.detach().mean((0, 2))
        self.passes[name] = self.passes.get(name, 0) + 1

    def decay_times(self, reduce=lambda means: means) -> torch.Tensor:
        """Return decay times since the last call in tokens, (gates,) fp32, shortest first; empty if no gate has run.

        Args:
            reduce: takes means of log f to their mean over all processes.
        """
        if not self.total:
            return torch.empty(0)
        means = torch.cat([total / self.passes[name] for name, total in self.total.items()])
        self.total, self.passes = {}, {}
        return (1 / (-reduce(means)).clamp(min=OPEN)).sort().values

    def quantiles(self, reduce=lambda means: means) -> dict[str, float]:
        """Return quantiles of the decay times, rounded to six digits, for a log."""
        times = self.decay_times(reduce)
        shares = times.new_tensor(list(QUANTILES.values()))
        values = times.quantile(shares).tolist() if len(times) else []
        return {f"decay_time_{name}": float(f"{value:.6g}") for name, value in zip(QUANTILES, values)}


__all__ = ["ForgetGateStatistics"]
