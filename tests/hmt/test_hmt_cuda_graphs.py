"""Passes replayed as CUDA graphs. `Replayed` stands in for a graph; `test_hmt_cuda_graphs_gpu.py` has real ones."""

import copy
import pickle

import pytest
import torch
from streams import CHUNKS, stream
from tiny_hmt import ROUNDING

from hf_longctx.hmt import call_hmt, graphs_hmt


class Replayed:
    """Compute a function again with the inputs of its capture, in place, as a graph does."""

    def __init__(self, function, inputs):
        self.function, self.inputs, self.count = function, inputs, 0
        self.outputs = function(*inputs)

    def replay(self):
        self.count += 1
        for mine, new in zip(self.outputs, self.function(*self.inputs)):
            mine.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """Let passes on the CPU be captured; the list of all captures."""
    captured = []

    def record(function, inputs):
        captured.append(Replayed(function, inputs))
        return captured[-1], captured[-1].outputs

    monkeypatch.setattr(graphs_hmt, "record", record)
    monkeypatch.setattr(call_hmt, "can_capture", lambda x: not torch.is_grad_enabled())
    return captured


SETTINGS = [
    {},
    {"reread": True},
    {"recall_tokens": 4},
    {"neural_cache_weight": 0.2},
    {"recall": False},
    {"recall_mode": "paper"},
]


def is_masked(settings):
    """Say whether a mask hides the prompt in the passes that end segments; others are not captured."""
    return not settings.get("reread") and settings.get("recall_mode") != "paper"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("keep", [0, 1])
def test_logits_are_equal(make_wrapper, tokens, graphs, settings, keep):
    eager, captured = make_wrapper(**settings), make_wrapper(cuda_graphs=True, **settings)
    for _ in range(2):
        expected = eager(tokens, labels=tokens, logits_to_keep=keep, output_recall=True)
        with torch.no_grad():
            out = captured(tokens, labels=tokens, logits_to_keep=keep, output_recall=True)
        torch.testing.assert_close(out.logits, expected.logits, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(out.memories, expected.memories, atol=ROUNDING, rtol=0)
    assert any(graph.count > 1 for graph in graphs) == is_masked(settings)


def test_any_chunking_is_one_piece(make_wrapper, tokens, graphs):
    model = make_wrapper(cuda_graphs=True)
    mask = torch.ones_like(tokens)
    mask[1, :13] = 0
    with torch.no_grad():
        expected = make_wrapper()(tokens, attention_mask=mask).logits
        for chunks in CHUNKS.values():
            logits, _ = stream(model, tokens, chunks, mask)
            torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)
    assert len(model.lm.graphs.graphs) <= graphs_hmt.MAX_GRAPHS


def test_other_weights_are_captured_again(make_wrapper, tokens, graphs):
    model, twin = make_wrapper(cuda_graphs=True), make_wrapper()
    with torch.no_grad():
        model(tokens)
        for change in ("in place", "replaced"):
            if change == "in place":
                model.backbone.lm_head.weight.mul_(2)
            if change == "replaced":
                layer = model.backbone.model.layers[0].mlp
                layer.up_proj.weight = torch.nn.Parameter(3 * layer.up_proj.weight)
            before = len(graphs)
            torch.testing.assert_close(model(tokens).logits, twin(tokens).logits, atol=ROUNDING, rtol=0)
            assert (len(graphs) > before) == (change != "in place")


def test_a_call_without_graphs_drops_them(make_wrapper, tokens, graphs):
    """The user can then capture a change in the code of a backbone, which no check notices."""
    model = make_wrapper(cuda_graphs=True)
    with torch.no_grad():
        model(tokens)
        assert model.lm.graphs.graphs
        for layer in model.backbone.model.layers:
            layer.self_attn.scaling *= 2
        expected = model(tokens, cuda_graphs=False).logits
        assert not model.lm.graphs.graphs
        torch.testing.assert_close(model(tokens).logits, expected, atol=ROUNDING, rtol=0)


def fails(function, inputs):
    raise RuntimeError("operation not permitted when stream is capturing")


def gives_other_numbers(function, inputs):
    graph = Replayed(lambda *x: [y + 1 for y in function(*x)], inputs)
    return graph, graph.outputs


@pytest.mark.parametrize(
    "record, warning", [(fails, "not captured as a CUDA graph"), (gives_other_numbers, "returned different numbers")]
)
def test_a_failed_capture_is_not_used(make_wrapper, tokens, graphs, monkeypatch, record, warning):
    monkeypatch.setattr(graphs_hmt, "record", record)
    model = make_wrapper(cuda_graphs=True)
    with torch.no_grad(), pytest.warns(UserWarning, match=warning):
        logits = model(tokens).logits
    torch.testing.assert_close(logits, make_wrapper()(tokens).logits, atol=ROUNDING, rtol=0)


def test_a_copy_of_a_model_has_no_graphs(make_wrapper, tokens, graphs):
    model = make_wrapper(cuda_graphs=True)
    with torch.no_grad():
        model(tokens)
        assert model.lm.graphs.graphs
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not other.lm.graphs.graphs
            torch.testing.assert_close(other(tokens).logits, model(tokens).logits, atol=ROUNDING, rtol=0)
