"""Norm, token shift and output gate in one pass: the kernels by their definition, and where they run."""

import pytest
import torch
from budget import DEVICE, runs_triton
from tiny_fox import check_logits, logits, tokens
from tiny_fox import make as make_fox
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel

from hf_longctx.fox import FoxConfig, FoxModel, fused_fox, launch_fox, triton_fox
from hf_longctx.fox.fused_fox import as_defined, fused_heads, fused_norm, norm_as_defined
from hf_longctx.fox.inputs_fox import find_successors


pytestmark = runs_triton


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels run wherever there is Triton."""
    monkeypatch.setattr(fused_fox, "has_kernels", lambda device: True)
    monkeypatch.setattr(launch_fox, "PLANS", {})


def documents(*lengths):
    """Return the predecessors and successors of documents in one row."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    predecessor = torch.arange(sum(lengths))
    predecessor[starts] = -1
    predecessor = predecessor[None].to(DEVICE)
    return predecessor, find_successors(predecessor, None), None


def padding(*rows):
    """Return the predecessors and successors in rows of real tokens, 1, and padding, 0, and a mask of real tokens."""
    mask = torch.tensor(rows, device=DEVICE).bool()
    last = torch.arange(1, mask.shape[1] + 1, device=DEVICE) * mask
    predecessor = torch.nn.functional.pad(last.cummax(1).values[:, :-1], (1, 0))
    return predecessor, find_successors(predecessor, mask), mask


ROWS = ([1] * 20, [0] * 7 + [1] * 13, [1] * 9 + [0] * 3 + [1] * 6 + [0] * 2)
NORMS = {
    "heads": dict(shape=(2, 37, 3, 64), per_head=True),
    "one weight": dict(shape=(2, 37, 3, 32)),
    "gate": dict(shape=(2, 37, 2, 64), per_head=True, gate="sigmoid", layout="wide"),
    "gate, heads first": dict(shape=(2, 20, 3, 48), gate="sigmoid", layout="heads first"),
    "silu of heads of 256": dict(shape=(1, 18, 2, 256), per_head=True, gate="silu"),
}
HEADS = {
    "plain": dict(shape=(2, 70, 4, 64), kv_heads=4, per_head=True),
    "groups": dict(shape=(2, 33, 4, 32), kv_heads=2),
    "one key head": dict(shape=(1, 33, 2, 40), kv_heads=1, per_head=True),
    "documents": dict(shape=(1, 64, 2, 128), kv_heads=1, neighbors=documents(40, 1, 1, 22)),
    "beside padding": dict(shape=(3, 20, 2, 48), kv_heads=2, per_head=True, neighbors=padding(*ROWS)),
}


def leaf(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))
    return x.to(DEVICE, dtype).requires_grad_()


def make_norm(shape, dtype, per_head=False, gate=None, layout="plain"):
    """Leaves, a function of a function and them, and the gradients of its outputs."""
    B, T, H, D = shape
    x = (
        leaf(B, H, T, D, dtype=dtype)
        if layout == "heads first"
        else leaf(B, T, H, D + 8 * (layout == "wide"), dtype=dtype)
    )
    leaves = [x, leaf(H * D if per_head else D)] + ([leaf(B, T, H * D, dtype=dtype)] if gate else [])

    def call(fused, x, weight, *gates):
        x = x.transpose(1, 2) if layout == "heads first" else x[..., :D]
        return [(fused_norm if fused else norm_as_defined)(x, weight, 1e-5, *gates, *([gate] if gate else []))]

    return leaves, call, [leaf(*((B, T, H * D) if gate else shape), dtype=dtype, seed=1).detach()]


def make_heads(shape, dtype, kv_heads, per_head=False, neighbors=(None, None, None)):
    """The same of QK-norm and token shift; what is at padding does not count."""
    (B, T, H, D), (predecessor, successor, mask) = shape, neighbors
    tokens = [leaf(B, T, h * D, dtype=dtype, seed=i) for i, h in enumerate((H, kv_heads, kv_heads))]
    weights = [leaf(h * D if per_head else D) for h in (H, kv_heads)]
    leaves = [*tokens, *weights, leaf(B, T, 2 * kv_heads)]

    def call(fused, q, k, v, q_weight, k_weight, share):
        if fused:
            outputs = fused_heads(q, k, v, q_weight, k_weight, D, 1e-5, share.sigmoid(), predecessor, successor)
        else:
            outputs = as_defined(q, q_weight, None, k, v, k_weight, share.sigmoid(), predecessor, D, 1e-5, None)
        return outputs if mask is None else [y.masked_fill(~mask[:, None, :, None], 0) for y in outputs]

    gradients = [leaf(B, h, T, D, dtype=dtype, seed=9).detach() for h in (H, kv_heads, kv_heads)]
    return leaves, call, gradients


def results(call, fused, leaves, gradients):
    outputs = call(fused, *leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [dy.to(y.dtype) for y, dy in zip(outputs, gradients)])]


CASES = {f"norm, {name}": (make_norm, case) for name, case in NORMS.items()}
CASES |= {f"shift, {name}": (make_heads, case) for name, case in HEADS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make, case", CASES.values(), ids=CASES)
def test_kernels_compute_what_is_defined(make, case, dtype, monkeypatch):
    launched, launch = [], fused_fox.launch
    monkeypatch.setattr(
        fused_fox, "launch", lambda *args, **kwargs: (launched.append(args[0]), launch(*args, **kwargs))
    )
    monkeypatch.setattr(fused_fox, "processors", lambda device: 1)  # each program has several blocks
    leaves, call, gradients = make(dtype=dtype, **case)
    fast = results(call, True, leaves, gradients)
    assert len(launched) == 2
    plain = results(call, False, leaves, gradients)
    exact = results(call, False, [x.detach().double().requires_grad_() for x in leaves], gradients)
    for i, (f, p, e) in enumerate(zip(fast, plain, exact)):
        assert f.dtype == p.dtype and f.shape == p.shape, i
        error, allowed = ((y.double() - e).norm() / e.norm() for y in (f, p))
        assert error <= 2 * allowed + torch.finfo(dtype).eps, f"{i}: {error:.1e}, plain {allowed:.1e}"


@pytest.mark.parametrize("make, case", CASES.values(), ids=CASES)
def test_second_and_batched_derivatives_are_those_of_the_definition(make, case):
    leaves, call, gradients = make(dtype=torch.float32, **case)
    found = []
    for fused in (True, False):
        outputs = call(fused, *leaves)
        first = torch.autograd.grad(outputs, leaves, gradients, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for fast, plain in zip(*found):
        torch.testing.assert_close(fast, plain, atol=2e-5 * plain.abs().max().item(), rtol=0)
    outputs = call(True, *leaves)
    batch = [torch.stack([dy, 2 * dy]) for dy in gradients]
    batched = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True)
    for got, one in zip(batched, torch.autograd.grad(call(False, *leaves), leaves, gradients)):
        torch.testing.assert_close(got[1], 2 * one, atol=2e-5 * one.abs().max().item(), rtol=0)


ONES = torch.ones(64, device=DEVICE)


def forward_mode(x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(fused_norm(dual, ONES, 1e-5)).tangent


UNFUSED = {
    "few tokens": lambda x: fused_norm(x[:, :16], ONES, 1e-5),
    "float64": lambda x: fused_norm(x.double(), ONES, 1e-5),
    "vmap": lambda x: torch.func.vmap(lambda y: fused_norm(y[None], ONES, 1e-5))(x),
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("call", UNFUSED.values(), ids=UNFUSED)
def test_everything_else_is_computed_as_defined(call, monkeypatch):
    monkeypatch.setattr(fused_fox, "launch", None)
    assert call(leaf(2, 20, 2, 64)).isfinite().all()


PACKED = torch.cat([torch.arange(9), torch.arange(15)])[None].expand(2, -1).to(DEVICE)
MASKS = {
    "left": [[0] * 5 + [1] * 19] * 2,
    "right": [[1] * 24, [1] * 18 + [0] * 6],
    "middle": [[1] * 9 + [0] * 4 + [1] * 11] * 2,
}
CALLS = {
    "plain": {},
    "documents": dict(position_ids=PACKED),
    "tree": dict(attention_mask=torch.ones(2, 1, 24, 24, device=DEVICE).tril().bool()),
    **{f"padding, {where}": dict(attention_mask=torch.tensor(mask, device=DEVICE)) for where, mask in MASKS.items()},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("variant", ["pro with grouped heads and rope", "pro"])
def test_models_have_the_same_losses_and_gradients(variant, call, monkeypatch):
    found, ids = [], tokens().to(DEVICE)
    mask = call.get("attention_mask", torch.ones(2, 24, device=DEVICE))
    labels = ids.masked_fill(mask == 0, -100) if mask.ndim == 2 else ids
    for fused in (True, False):
        monkeypatch.setattr(fused_fox, "has_kernels", lambda device, fused=fused: fused)
        model = make_fox(variant).to(DEVICE).train()
        loss = model(ids, labels=labels, **call).loss
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for name, fast in found[0].items():
        check_logits(fast, found[1][name])


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "o_norm", "v_shift_proj"])
def test_a_module_that_was_replaced_is_called(name):
    model, called = make_fox("pro").to(DEVICE), []
    module = getattr(model.model.layers[0].self_attn, name)
    module.register_forward_hook(lambda *_: called.append("hook"))
    module = getattr(model.model.layers[1].self_attn, name)
    forward = module.forward
    module.forward = lambda x: (called.append("forward"), forward(x))[1]
    logits(model, tokens().to(DEVICE))
    assert called == ["hook", "forward"]


def test_a_graph_does_not_ask_for_the_gpu(monkeypatch):
    """torch 2.11 ends a graph where `torch.cuda.get_device_capability` is called."""

    def has_kernels(device):
        torch._dynamo.graph_break()
        return True

    monkeypatch.setattr(fused_fox, "has_kernels", has_kernels)
    model, ids = make_fox("pro").to(DEVICE), tokens(1, 40)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert (compiled(ids).logits - model(ids).logits).abs().max() < 1e-5


# --- launches and saved bytes of a layer in training on a GPU, compared with a layer of Llama ---

B, T, HIDDEN = 2, 80, 128
SIZES = dict(vocab_size=16, hidden_size=HIDDEN, num_attention_heads=2, num_hidden_layers=1)


class Launches(TorchDispatchMode):
    """Count the operations for which a GPU launches a kernel: all but views and empty tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view and not function.__name__.startswith(("empty", "new_empty", "detach")):
            self.count += 1
        return function(*args, **(kwargs or {}))


class RMSNormOnGPU(torch.autograd.Function):
    """Cost what PyTorch's RMSNorm costs on a GPU: a kernel forward and two backward, with its inputs saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        _, weight, _ = ctx.saved_tensors
        return dy.clone(), torch.zeros_like(weight)


def costs(layer, **inputs):
    """Return the launches of a step under autocast, and its saved bytes per byte of bfloat16 hidden states."""
    saved = {}
    # an optimizer holds the weights, and autocast their copies
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    copies = {2 * p.numel() for p in layer.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() not in copies:
            saved[storage.data_ptr()] = storage  # held here, so that no address is used twice
        return x

    x = torch.randn(B, T, HIDDEN, requires_grad=True)
    with Launches() as launches, saved_tensors_hooks(pack, lambda x: x):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, **inputs)
        y.sum().backward()
    return launches.count, sum(storage.nbytes() for storage in saved.values()) / (2 * x.numel())


@pytest.fixture(scope="module")
def llama():
    model = LlamaModel(LlamaConfig(**SIZES, intermediate_size=336, attn_implementation="sdpa"))
    positions = torch.arange(T)[None]
    embeddings = model.rotary_emb(torch.ones(1), positions)
    return costs(model.layers[0], position_embeddings=embeddings, position_ids=positions)


@pytest.mark.parametrize(
    "config, launches, saved",
    [
        (FoxConfig(**SIZES, intermediate_size=336), 100, 0.8),
        (FoxConfig.pro(**SIZES, intermediate_size=304, qk_norm_shared=True), 116, 0.9),
        (FoxConfig.pro(**SIZES, intermediate_size=304, output_gate="silu"), 114, 0.9),
    ],
    ids=["FoX (LLaMA)", "FoX (Pro)", "FoX (Pro) with a norm per head"],
)
def test_layer_costs_no_more_than_that_of_a_llama(config, launches, saved, llama, monkeypatch):
    launched = []
    for module in (fused_fox, triton_fox):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel))
        monkeypatch.setattr(module, "is_traced", lambda *tensors: False)
    monkeypatch.setattr(fused_fox.F, "rms_norm", lambda x, shape, weight, eps: RMSNormOnGPU.apply(x, weight))
    model = FoxModel(config)
    model.set_attn_implementation("forgetting_triton")
    operations, bytes_saved = costs(model.layers[0])
    assert operations + len(launched) <= min(launches, llama[0])
    assert bytes_saved <= saved * llama[1]
