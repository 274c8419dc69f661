"""The engine against its definition, one plain forward pass per input: any model, any budget, bounded passes."""

import functools

import numpy as np
import pytest
import torch
from tiny_models import build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics.run.engine import Engine, argmax


V = 89  # no other dimension has this size
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
SMALL |= {"vocab_size": V, "varied": True}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
MODELS = {
    # name: (type, config, reuses prefixes)
    "llama": ("llama", SMALL, True),
    "sliding-window": ("mistral", SMALL | {"sliding_window": 9, "num_key_value_heads": 1}, True),
    "chunked": (
        "llama4_text",
        SMALL | {"attention_chunk_size": 8, "num_local_experts": 2, "num_key_value_heads": 1},
        True,
    ),
    "fox": ("fox", SMALL, True),
    "mamba": ("mamba", SMALL | {"state_size": 2}, False),
    "dynamic-rope": ("llama", SMALL | {"rope_parameters": ROPE, "max_position_embeddings": 16}, False),
    "longrope": (
        "phi3",
        SMALL | {"rope_parameters": LONG | {"original_max_position_embeddings": 16}, "pad_token_id": 0},
        False,
    ),
}


def inputs_with_shared_prefixes():
    """Six inputs of 41 ids: four begin with the same 20, two of them are equal."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(3, V, size=(6, 41))
    inputs[[0, 2, 3, 5], :20] = inputs[0, :20]
    inputs[5] = inputs[2]
    return inputs


def with_memory(model):
    return HMTWrapper.from_backbone(model, HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4)).eval()


def adapted(name, adapter, **options):
    peft = pytest.importorskip("peft")
    config = getattr(peft, adapter)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(build(name, **SMALL), config).eval()


BUILD = {
    "hmt": lambda: with_memory(build("llama", **SMALL)),
    "LoRA": lambda: adapted("llama", "LoraConfig", target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "prompt tuning": lambda: adapted("llama", "PromptTuningConfig", num_virtual_tokens=3),
    "prefix tuning": lambda: adapted("llama", "PrefixTuningConfig", num_virtual_tokens=3),
    "bfloat16": lambda: build("llama", **SMALL).to(torch.bfloat16),
}
# every model with a small budget; others with one model of each way to read
BUDGETS = [(name, 7) for name in [*MODELS, *BUILD]]
BUDGETS += [("llama", 1), ("llama", 100), ("sliding-window", 100), ("mamba", 1000)]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # PEFT uses deprecated names of transformers
@pytest.mark.parametrize("name, tokens_per_pass", BUDGETS)
def test_logits_and_predictions_are_those_of_the_definition(name, tokens_per_pass):
    """One forward pass for each input, without a cache; where two logits are close, either may win."""
    if name in MODELS:
        kind, config, reuses = MODELS[name]
        model = build(kind, **config)
    else:
        model, reuses = BUILD[name](), None
    inputs, positions = inputs_with_shared_prefixes(), range(27, 39)
    with torch.inference_mode():
        whole = torch.cat([model(torch.tensor(row[None]), use_cache=False).logits for row in inputs])
        expected = whole[:, -inputs.shape[1] :][:, positions.start : positions.stop]  # after virtual tokens
        engine = Engine(model, inputs[0], tokens_per_pass)
        predictions = engine.predict(inputs, 20, positions)
        logits = torch.cat([*engine.logits(inputs[0], positions)])
    assert reuses is None or engine.reuses_prefixes == reuses
    close = 0.1 if model.dtype is torch.bfloat16 else 1e-4
    assert torch.allclose(logits.float(), expected[0].float(), atol=close)
    best = expected.float().topk(2).values
    assert ((predictions == argmax(expected)) | ((best[..., 0] - best[..., 1]).numpy() < close)).all()
    assert len(np.unique(predictions)) > 5


class Watch(TorchDispatchMode):
    """Sees the largest tensor of logits, and the tokens of each embedding."""

    def __init__(self):
        super().__init__()
        self.logits, self.passes = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (V,):
            self.logits = max(self.logits, result.numel() // V)
        if function is torch.ops.aten.embedding.default:
            self.passes.append(args[1].numel())
        return result


def test_passes_are_bounded_and_shared_prefixes_read_once():
    model, inputs = build("llama", **SMALL), inputs_with_shared_prefixes()
    with torch.inference_mode():
        engine = Engine(model, inputs[0], tokens_per_pass=8)
        engine.logits_per_pass = 5 * V
        with Watch() as watch:
            engine.predict(inputs, 20, range(27, 39))
    assert max(watch.passes) == 8
    assert sum(watch.passes) == 20 + 4 * (39 - 20) + 2 * 39  # nothing is read after the last position
    assert watch.logits == 5


def test_short_inputs_share_a_pass():
    model, inputs = build("llama", **SMALL), inputs_with_shared_prefixes()
    with torch.inference_mode():
        engine = Engine(model, inputs[0], tokens_per_pass=3 * 41)
        with Watch() as watch:
            engine.predict(inputs, 20, range(27, 39))
    assert watch.passes == [20, 3 * 19, 19, 2 * 39]


def test_rounding_of_a_single_token_does_not_disable_the_cache():
    """In bfloat16, the logits of Qwen2.5 at a token with massive activations depend on the shape of the pass."""
    model, inputs = build("llama", **SMALL).to(torch.bfloat16), inputs_with_shared_prefixes()

    def round_differently(module, arguments, output):
        if output.logits.shape[1] in (10, 32):  # the first chunk, and the whole trial
            output.logits[:, 1] *= 1 + 8 / output.logits.shape[1]

    model.register_forward_hook(round_differently)
    with torch.inference_mode():
        assert Engine(model, inputs[0]).reuses_prefixes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_does_not_do_what_it_says_is_not_used(dtype):
    model, inputs = build("llama", **SMALL).to(dtype), inputs_with_shared_prefixes()
    forward = model.model.forward

    @functools.wraps(forward)
    def forgetful(input_ids, **options):
        """Return a model whose positions restart in each call."""
        options["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return forward(input_ids, **options)

    model.model.forward = forgetful
    with torch.inference_mode():
        assert not Engine(model, inputs[0]).reuses_prefixes


def test_frequencies_of_dynamic_rope_are_those_of_the_input():
    """The rotary embedding caches the frequencies of the longest input that it has read."""
    kind, config, *_ = MODELS["dynamic-rope"]
    model, (short, long) = build(kind, **config), np.random.default_rng(0).integers(3, V, size=(2, 60))
    short = short[:30]
    with torch.inference_mode():
        engine = Engine(model, short)
        expected, predictions = torch.cat([*engine.logits(short, range(20, 29))]), []
        for read in (lambda: engine.predict(long[None], 0, range(50, 59)), lambda: [*engine.logits(long, range(59))]):
            read()
            predictions.append(engine.predict(short[None], 0, range(20, 29))[0])
            read()
            assert torch.equal(torch.cat([*engine.logits(short, range(20, 29))]), expected)
    assert np.array_equal(predictions, [argmax(expected)] * 2)


class Shift(nn.Module):
    """Predicts the id that stands `ahead` positions further on, 0 beyond the end."""

    config = None

    def __init__(self, ahead, block=None):
        super().__init__()
        self.ahead, self.block = ahead, block

    def forward(self, input_ids):
        ids = torch.nn.functional.pad(input_ids, (0, 99))
        at = torch.arange(input_ids.shape[1])
        at = at + self.ahead if self.block is None else at // self.block * self.block + self.block - 1
        return (torch.nn.functional.one_hot(ids[:, at], V).float(),)


@pytest.mark.parametrize("tokens", [4, 19, 40])
@pytest.mark.parametrize("model", [Shift(1), Shift(0, block=2)], ids=["one ahead", "blocks of 2"])
def test_a_model_that_looks_ahead_is_refused(model, tokens):
    trial = np.random.default_rng(0).integers(0, V, tokens)
    with pytest.raises(ValueError, match="Shift is not causal"):
        Engine(model, trial)
    Engine(Shift(0), trial)
    Engine(Shift(0), np.full(tokens, 5))
    with pytest.raises(ValueError, match="Shift is not causal"):
        Engine(model, np.full(tokens, 5))


def test_rounding_is_not_taken_for_looking_ahead():
    """Experts group tokens differently where later ones change."""

    class Rounding(Shift):
        def forward(self, input_ids):
            (logits,) = super().forward(input_ids)
            return (logits + self.size * torch.randn_like(logits),)

    torch.manual_seed(0)
    model, trial = Rounding(0), np.random.default_rng(0).integers(0, V, 32)
    model.quantized = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    model.size = 1e-6
    Engine(model, trial)
    model.size = 1e-4
    with pytest.raises(ValueError, match="not causal"):
        Engine(model, trial)


@pytest.mark.parametrize("kind, dtype", [("bert", torch.float32), ("xlnet", torch.bfloat16)])
def test_encoders_are_refused_and_decoders_are_not(kind, dtype):
    xlnet = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16, "vocab_size": V, "varied": True}
    config = {"bert": SMALL, "xlnet": xlnet}[kind]
    decoder = {"bert": {"is_decoder": True}, "xlnet": {"attn_type": "uni"}}[kind]
    trial = np.random.default_rng(0).integers(3, V, 32)
    with torch.inference_mode():
        with pytest.raises(ValueError, match=r"is not causal.*is_decoder=True"):
            Engine(build(kind, **config).to(dtype), trial)
        Engine(build(kind, **config, **decoder).to(dtype), trial)


def test_the_first_of_equal_logits_counts_and_nan_is_no_prediction():
    logits = torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 3.0], [torch.nan, 1.0, 5.0]])
    assert argmax(logits).tolist() == [1, 0, -1]
