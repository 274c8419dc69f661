"""CUDA graphs of the pass that ends a segment: `cuda_graphs` of `HMTConfig`.

A segment takes some 700 launches, and on a GPU they take longer than the work. The passes that end the segments of a
sequence have the same shapes, so the second one is captured, and all others are replayed with one launch. The replayed
kernels are those of an eager pass, so the logits are equal. Passes in which no mask hides a prompt stay eager.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


MAX_GRAPHS = 8  # each keeps the activations of one pass


class PassGraph:
    """A function of tensors, captured with inputs and outputs that stay where they are."""

    def __init__(self, function: Callable[..., list[Tensor]], inputs: list[Tensor]):
        self.inputs = [x.clone() for x in inputs]
        self.graph, self.outputs = record(function, self.inputs)

    def replay(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute the function again with other inputs of the same shapes."""
        torch._foreach_copy_(self.inputs, inputs)
        self.graph.replay()
        return [x.clone() for x in self.outputs]


def record(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Capture a function; return the graph and its outputs, which every replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate their workspaces
        function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function(*inputs)
    return graph, outputs


def can_capture(x: Tensor) -> bool:
    """Say whether passes over `x` can be captured: on a CUDA device, without gradients, autocast or a compiler."""
    if x.device.type != "cuda" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.is_autocast_enabled(x.device.type) and not torch.cuda.is_current_stream_capturing()


class PassGraphs:
    """The captured passes of a model, for each shape, thread and stream. The first pass of a shape is eager."""

    def __init__(self):
        self.graphs: OrderedDict[Hashable, PassGraph | None] = OrderedDict()  # None: not captured yet
        self.refused: set[Hashable] = set()
        self.weights: Hashable = None

    def __deepcopy__(self, memo: dict) -> "PassGraphs":
        """Make an empty object: a copy of the model has other weights."""
        return PassGraphs()

    def __reduce__(self) -> tuple:
        """Pickle as an empty object."""
        return PassGraphs, ()

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop all graphs if the model computes with other tensors, modules, adapters or modes than they do."""
        tensors = tuple((x.data_ptr(), x.dtype) for x in (*model.parameters(), *model.buffers()))
        modules = tuple(
            (id(module), module.training, *(str(getattr(module, name, None)) for name in _ADAPTER_SWITCHES))
            for module in model.modules()
        )
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        weights = hash((tensors, modules, attention))
        if weights != self.weights:
            self.clear()
            self.weights = weights

    def clear(self) -> None:
        """Drop all graphs."""
        self.graphs.clear()
        self.refused.clear()

    def run(self, key: Hashable, function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> list[Tensor]:
        """Compute function(*inputs), by a replay where the same has been computed before.

        Args:
            key: what else than shapes and dtypes of the inputs decides what the function computes.
            function: what is captured. It must do the same for all inputs, and leave them as they are.
        """
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        stream = torch.cuda.current_stream().cuda_stream if inputs[0].is_cuda else None
        key = (key, shapes, threading.get_ident(), stream)
        if key in self.refused:
            return function(*inputs)
        graph = self.graphs.get(key)
        if graph is not None:
            self.graphs.move_to_end(key)
            return graph.replay(inputs)
        outputs = function(*inputs)
        if key not in self.graphs:
            self.graphs[key] = None
        else:
            self.graphs[key] = self.capture(function, inputs, outputs)
            if self.graphs[key] is None:
                self.refused.add(key)
        while len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)
        return outputs

    def capture(
        self, function: Callable[..., list[Tensor]], inputs: list[Tensor], expected: list[Tensor]
    ) -> PassGraph | None:
        """Capture a function, or warn and return None if it cannot be, or a replay does not give what is expected."""
        try:
            graph = PassGraph(function, inputs)
            outputs = graph.replay(inputs)
        except Exception as error:  # a backbone may wait for the GPU, which no capture can
            warnings.warn(f"A pass was not captured as a CUDA graph, and stays eager: {error}", stacklevel=2)
            return None
        pairs = zip(outputs, expected)
        if not all(torch.allclose(x, y, atol=0.01 * y.abs().max().item(), rtol=0) for x, y in pairs):
            warnings.warn("A captured pass gave other numbers than an eager one, and stays eager.", stacklevel=2)
            return None
        return graph


_ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters")  # of PEFT's layers


__all__ = ["PassGraphs", "can_capture"]
