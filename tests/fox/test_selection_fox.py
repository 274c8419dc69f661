"""attn_implementation="auto": the fastest implementation that is right, measured once for a machine.

A CPU stands for the GPU, and Triton's interpreter for its kernels; times are made up.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_fox import NO_TRITON, ROPE, TINY, make_from, skip_without_triton, tokens
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_longctx.fox import FoxConfig, PrunedCache, backend_fox, selection_fox
from hf_longctx.fox.modeling_fox import FoxAttention
from hf_longctx.fox.selection_fox import make_case, measure, with_length


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
CPU = torch.device("cpu")
SIZES = TINY | dict(num_hidden_layers=1, head_dim=16)
CONFIGS = {
    "llama": lambda: FoxConfig(**SIZES),
    "pro, grouped heads": lambda: FoxConfig.pro(**SIZES, num_key_value_heads=2, rope_parameters=ROPE),
    "shared gates, window": lambda: FoxConfig(
        **SIZES, num_key_value_heads=2, forget_gate_per_kv_head=True, sliding_window=50
    ),
}


class WrongGradient(torch.autograd.Function):
    """As FlashAttention-4 at widths that are no multiple of 32: the last columns of dq hold something else."""

    @staticmethod
    def forward(ctx, q):
        return q.clone()

    @staticmethod
    def backward(ctx, dq):
        return torch.cat([dq[..., :12], dq[..., 12:].roll(1, 2)], -1)


def wrong_gradient(module, query, *args, **kwargs):
    return sdpa_attention_forward(module, WrongGradient.apply(query), *args, **kwargs)


def without_gate(module, query, key, value, *args, **kwargs):
    query, key = (x[..., : module.head_dim] for x in (query, key))
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def no_kernel(*args, **kwargs):
    raise RuntimeError("no kernel for this GPU")


WRONG = {"wrong_gradient": wrong_gradient, "without_gate": without_gate, "no_kernel": no_kernel}


def pretend(monkeypatch, folder, times):
    """Make a CPU the GPU; `times` are made up. Return names in the order in which they are measured."""
    for name, function in WRONG.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    monkeypatch.setattr(backend_fox, "ATTENTION_BACKENDS", (*backend_fox.ATTENTION_BACKENDS, *WRONG))
    names = [*WRONG, *([] if NO_TRITON else ["forgetting_triton"]), "sdpa"]
    monkeypatch.setattr(selection_fox, "CANDIDATES", names)
    monkeypatch.setattr(selection_fox, "MEASURED", ["cpu"])
    monkeypatch.setattr(selection_fox, "FILE", Path(folder) / "home" / "attention.json")
    monkeypatch.setattr(selection_fox, "CHECKED", ((1, 1, 37),))
    monkeypatch.setattr(selection_fox, "ORDERS", {})
    monkeypatch.setattr(selection_fox, "LATEST", {})
    monkeypatch.setattr(selection_fox, "seconds", lambda function: next(times))
    return names


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which the interpreter is fastest of the right ones."""
    return pretend(monkeypatch, tmp_path, itertools.count())


@pytest.mark.parametrize(
    "config, work, dtype",
    [
        ("llama", "training", torch.bfloat16),
        ("llama", "decoding", torch.float32),
        ("pro, grouped heads", "training", torch.float32),
        ("pro, grouped heads", "decoding", torch.bfloat16),
        ("shared gates, window", "training", torch.float32),
        ("shared gates, window", "prefill", torch.bfloat16),
        ("shared gates, window", "decoding", torch.float32),
    ],
)
def test_right_candidates_are_kept_and_wrong_ones_named(config, work, dtype, machine):
    config = CONFIGS[config]()
    case = with_length(make_case(config, dtype, work), 100)
    order = measure(case, config, FoxAttention, CPU)
    wrong = ["wrong_gradient", "without_gate"] if work == "training" else ["without_gate"]
    assert list(order.wrong) == wrong
    assert list(order.milliseconds) == [name for name in machine if name not in (*wrong, "no_kernel")]


def make(config="pro, grouped heads"):
    model = make_from(CONFIGS[config]())
    model.set_attn_implementation("auto")
    return model


@pytest.fixture
def used(monkeypatch):
    """Return the names of the implementations that compute calls of models."""
    names = []

    def run_backend(name, *args, **kwargs):
        names.append(name)
        return run(name, *args, **kwargs)

    run = backend_fox.run_backend
    monkeypatch.setattr(backend_fox, "run_backend", run_backend)
    return names


def test_without_a_gpu_auto_is_sdpa_and_is_not_saved(tmp_path, used):
    model, ids = make(), tokens()
    model.save_pretrained(tmp_path)
    assert "attn" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="auto")
    got = loaded(ids).logits
    assert loaded.config._attn_implementation == "auto" and set(used) == {"sdpa"}
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(got, loaded(ids).logits)


def test_a_machine_is_measured_once_and_wrong_candidates_are_named(machine, used, monkeypatch, caplog):
    model, ids = make(), tokens(1, 20)
    model(ids)
    fastest = machine[-2] if "forgetting_triton" in machine else "sdpa"
    assert used[-1] == fastest
    assert "'wrong_gradient' computes FoX wrongly" in caplog.text and "dq is" in caplog.text
    assert "'without_gate' computes FoX wrongly" in caplog.text and "no_kernel" not in caplog.text
    selection_fox.ORDERS.clear()  # as in another process
    monkeypatch.setattr(selection_fox, "measure", None)
    model(ids)
    assert used[-1] == fastest
    selection_fox.FILE.write_text("{")
    assert selection_fox.read_orders() == {}


@torch.no_grad()
def test_calls_that_the_fastest_cannot_compute_take_another(machine, used, monkeypatch):
    order = selection_fox.Order({"flash_attention_2": 1.0, "forgetting_triton": 2.0, "sdpa": 3.0}, {})
    monkeypatch.setattr(selection_fox, "rank", lambda *args: list(order.milliseconds))
    config, x = CONFIGS["llama"](), torch.zeros(1, 20, 32)

    def choice(config=config, **options):
        return selection_fox.configure_attention(config, FoxAttention, x, **options)._attn_implementation

    model = make_from(config)
    padded = {"attention_mask": torch.tensor([[1, 0, 1]])}
    assert choice() == "flash_attention_2" == choice(past_key_values=DynamicCache(config=config))
    assert choice(past_key_values=PrunedCache(model, 1e-4)) == "forgetting_triton"
    assert choice(past_key_values=PrunedCache(model, 1e-4), **padded) == "sdpa"
    with torch.enable_grad():
        assert choice(FoxConfig(**SIZES, attention_dropout=0.1)) == "flash_attention_2"
    assert choice(FoxConfig(**SIZES, forget_gate="none")) == "sdpa"


@torch.no_grad()
@pytest.mark.parametrize("fastest", ["sdpa", pytest.param("forgetting_triton", marks=skip_without_triton)])
def test_while_compiling_what_was_found_before_is_taken(fastest, machine, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(selection_fox, "CANDIDATES", [fastest])
    model, ids, graphs = make("llama"), tokens(1, 20), []
    want = model(ids, use_cache=False).logits
    monkeypatch.setattr(selection_fox, "measure", None)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(ids), want)
    called = " ".join(str(node.target) for node in graphs[0].graph.nodes)
    assert ("fox_forward" in called, "scaled_dot" in called) == (fastest != "sdpa", fastest == "sdpa")


@torch.no_grad()
def test_transforms_of_torch_func_take_sdpa(machine, used, monkeypatch):
    """No derivative is asked of kernels that have none, and nothing is measured there."""
    monkeypatch.setattr(selection_fox, "measure", None)
    model, embeds = make("llama"), torch.randn(1, 5, 32)
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.jvp(lambda x: model(inputs_embeds=x).logits, (embeds,), (embeds,))
        with forward_ad.dual_level():
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))
        torch.func.grad(lambda x: model(inputs_embeds=x).logits.sum())(embeds)
    assert set(used) == {"sdpa"}


def test_what_ran_out_of_memory_is_tried_again_by_the_next_process(machine, used, monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, ids = make(), tokens(1, 20)
    with monkeypatch.context() as patch:
        patch.setitem(backend_fox.GATED, "forgetting_triton", no_memory)
        patch.setattr(backend_fox, "forgetting_triton_attention", no_memory)
        patch.setattr(selection_fox, "CANDIDATES", ["forgetting_triton", "sdpa"])
        model(ids)
        assert used[-1] == "sdpa" and not selection_fox.read_orders()
        patch.setattr(selection_fox, "measure", None)  # this one has measured
        model(ids)
    selection_fox.ORDERS.clear()
    model(ids)
    assert used[-1] == (machine[-2] if "forgetting_triton" in machine else "sdpa") and selection_fox.read_orders()


def choose_at_once(folder):
    """Choose while the other process does; by itself, each would find another order."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, folder, itertools.count(0, -1 if rank else 1))
        patch.setattr(selection_fox, "CANDIDATES", ["sdpa", "eager"])
        measured = []
        patch.setattr(selection_fox, "measure", lambda *args: measured.append(args) or measure(*args))
        model = make("llama")
        dist.barrier()
        names = model.rank_attention(20, False, torch.float32, "cpu")
        result: list[Any] = [None] * 2
        dist.all_gather_object(result, (names, len(measured)))
    return result


def test_two_processes_that_choose_at_once_take_the_same(two_processes, tmp_path):
    (first, measured), (second, also) = two_processes(choose_at_once, str(tmp_path))
    assert first == second and sorted(first) == ["eager", "sdpa"] and measured + also == 1


def test_generation_in_every_cache(machine, used):
    model, ids = make(), tokens(1, 20)
    settings = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    got = [
        model.generate(ids, **settings),
        model.generate(ids, **settings, cache_implementation="static", disable_compile=True),
    ]
    assert len(list(selection_fox.read_orders())) == 2  # prefill and decoding, both caches
    model.set_attn_implementation("eager")
    want = model.generate(ids, **settings)
    assert torch.equal(got[0], want) and torch.equal(got[1], want)


def test_no_right_implementation_is_an_error(machine, monkeypatch):
    monkeypatch.setattr(selection_fox, "CANDIDATES", ["without_gate", "no_kernel"])
    with pytest.raises(RuntimeError, match=r"without_gate.*off.*'eager'"):
        make().rank_attention(20, False, torch.float32, "cpu")
