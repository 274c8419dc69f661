"""Capture the pass that ends each segment as a CUDA graph (`HMTConfig(cuda_graphs=True)`).

Reading a segment needs about 700 kernel launches, which take longer than the kernels. The passes that end the segments
of a sequence have the same shapes. HMT captures the second of these passes as a graph. Each later pass replays it with
a single launch, and runs the same kernels.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from .caches_hmt import fork, tensors_of


MAX_GRAPHS = 8  # a limit, because each graph retains the activations of one pass
_ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters")  # attributes of PEFT layers


class PassGraph:
    """A CUDA graph of a function of tensors, with its static input and output tensors."""

    def __init__(self, function: Callable[..., list[Tensor]], inputs: list[Tensor]):
        self.inputs = [x.clone() for x in inputs]
        self.graph, self.outputs = record(function, self.inputs)

    def replay(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs for new inputs with the shapes of the captured inputs."""
        torch._foreach_copy_(self.inputs, inputs)
        self.graph.replay()
        return [x.clone() for x in self.outputs]


def record(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Capture a function, and return the graph and its outputs. Every replay overwrites the outputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a warm-up: libraries allocate their workspaces
        function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function(*inputs)
    return graph, outputs


def can_capture(x: Tensor) -> bool:
    """Return whether passes over `x` can be captured: on a CUDA device, without gradients, autocast or compilation."""
    if x.device.type != "cuda" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.is_autocast_enabled(x.device.type) and not torch.cuda.is_current_stream_capturing()


class PassGraphs:
    """The CUDA graphs of a model, keyed by shape, thread and stream. The first pass of each shape is eager."""

    def __init__(self):
        # A value is None after the first eager pass, and then a graph. If the pass cannot be captured, it is False.
        self.graphs: OrderedDict[Hashable, PassGraph | bool | None] = OrderedDict()
        self.weights: Hashable = None

    def __reduce__(self) -> tuple:
        """Pickle or copy as an empty object, because graphs refer to the weights of the original model."""
        return PassGraphs, ()

    def of(self, model: torch.nn.Module) -> "PassGraphs":
        """Return self. If the model's tensors, modules, adapters or modes have changed, first drop all graphs."""
        tensors = tuple((x.data_ptr(), x.dtype) for x in (*model.parameters(), *model.buffers()))
        modules = tuple(
            (id(module), module.training, *(str(getattr(module, name, None)) for name in _ADAPTER_SWITCHES))
            for module in model.modules()
        )
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        weights = hash((tensors, modules, attention))
        if weights != self.weights:
            self.graphs.clear()
            self.weights = weights
        return self

    def run(
        self, function: Callable[..., tuple], kv_cache: Cache | None, **given: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return function(**given, kv_cache=kv_cache). If a pass of the same shapes was captured, replay its graph.

        Args:
            function: returns (logits or None, hidden states). It must launch the same kernels for all inputs of the
                same shapes.
            kv_cache: cache that the function reads, or None. The function gets a copy.
        """
        arguments = {name: value for name, value in given.items() if value is not None}
        layers = [] if kv_cache is None else kv_cache.layers
        cached = {(i, name): x for i, layer in enumerate(layers) for name, x in tensors_of(layer).items()}
        inputs = [*arguments.values(), *cached.values()]

        def of_tensors(*tensors: Tensor) -> list[Tensor]:
            cache: Any = None if kv_cache is None else fork(kv_cache)
            for (i, name), value in zip(cached, tensors[len(arguments) :]):
                setattr(cache.layers[i], name, value)
            logits, hidden = function(**dict(zip(arguments, tensors)), kv_cache=cache)
            return [hidden] if logits is None else [hidden, logits]

        shapes = tuple((x.shape, x.dtype) for x in inputs)
        stream = torch.cuda.current_stream().cuda_stream if inputs[0].is_cuda else None
        key = (*arguments, shapes, threading.get_ident(), stream)
        if key in self.graphs:
            self.graphs.move_to_end(key)
        graph = self.graphs.get(key)
        if isinstance(graph, PassGraph):
            hidden, *logits = graph.replay(inputs)
        else:
            hidden, *logits = outputs = of_tensors(*inputs)
            if graph is None:
                self.graphs[key] = self.capture(of_tensors, inputs, outputs) if key in self.graphs else None
            while len(self.graphs) > MAX_GRAPHS:
                self.graphs.popitem(last=False)
        return logits[0] if logits else None, hidden

    def capture(
        self, function: Callable[..., list[Tensor]], inputs: list[Tensor], expected: list[Tensor]
    ) -> PassGraph | bool:
        """Capture a function. If this fails, or a replay does not return `expected`, warn and return False."""
        try:
            graph = PassGraph(function, inputs)
            outputs = graph.replay(inputs)
        except Exception as error:  # for example, because the backbone synchronizes with the GPU
            warnings.warn(
                f"HMT runs a pass eagerly, because it was not captured as a CUDA graph: {error}", stacklevel=2
            )
            return False
        pairs = zip(outputs, expected)
        if not all(torch.allclose(x, y, atol=0.01 * y.abs().max().item(), rtol=0) for x, y in pairs):
            warnings.warn("HMT runs a pass eagerly, because its CUDA graph returned different numbers.", stacklevel=2)
            return False
        return graph
