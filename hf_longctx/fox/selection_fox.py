"""Which attention implementation is right and fastest on this machine: `attn_implementation="auto"`.

The first call on a GPU, for a dtype, a size of heads, a kind of work and a length, compares every candidate with the
definition in float64 and times it. The order is kept in a file, which all processes of the machine share: the first of
them measures, the others wait for it. Elsewhere than on a GPU, and under transforms of torch.func, "auto" is "sdpa".
While torch compiles or a CUDA graph is captured nothing can be measured: what an earlier call of the same kind took is
taken, "sdpa" if there was none.
"""

import functools
import hashlib
import json
import math
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import WeakFileLock
from torch.autograd import forward_ad
from transformers.cache_utils import DynamicCache
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
    logging,
)

from .attention_fox import autocast_dtype, fold_keys, forgetting_attention_ref, running_sum
from .backend_fox import NAME, SDPA, attend
from .budget_fox import EPS, FOLDED_DLOG_F, draw, find_errors, run, run_exact, run_plain
from .call_fox import Call
from .inputs_fox import read_call, with_implementation
from .kernels_fox import triton
from .state_fox import AttendingCache
from .tiles_fox import DECODE_ROWS


logger = logging.get_logger(__name__)
AUTO = "auto"
FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
CANDIDATES = ["sdpa", *SDPA, NAME, *FLASH]
MEASURED = ["cuda"]  # device types
FILE = Path(HF_HOME) / "hf_longctx" / "attention.json"
CHECKED = ((2, 2, 129), (1, 1, 301))  # batch, key heads and tokens that are compared with the definition
TIMED = 2**17  # tokens times key heads that are timed at most, to take little memory beside a training's


class Case(NamedTuple):
    """What an order of implementations depends on.

    group: query heads of a key head. work: "training", "prefill" or "decoding". length: tokens that are seen, a power
    of two; 0 for any.
    """

    dtype: torch.dtype
    head_dim: int
    group: int
    gates_per_key: int
    window: int | None
    pruned: bool
    work: str
    length: int = 0


class Finding(NamedTuple):
    """What was found of one implementation, for a `Case`.

    errors: {result: (how far it is from the definition, how far it may be)}, shares of the result's norm.
    milliseconds: of a call, None if it is wrong.
    failure: the exception that it raised, in words.
    out_of_memory: that was for want of memory, and may be different another time.
    """

    errors: dict[str, tuple[float, float]] = {}
    milliseconds: float | None = None
    failure: str | None = None
    out_of_memory: bool = False

    def mistake(self) -> str | None:
        """Return the worst error in words, None if all are within the budget."""
        wrong = {name: pair for name, pair in self.errors.items() if not pair[0] <= pair[1]}
        if not wrong:
            return None
        name, (error, allowed) = max(wrong.items(), key=lambda item: item[1][0] / item[1][1])
        return f"{name} is {error:.2%} of its norm off, where {allowed:.2%} are rounding"


class Order(NamedTuple):
    """What was found for a `Case`: the time of right implementations, the fastest first, and errors of wrong ones."""

    milliseconds: dict[str, float]
    wrong: dict[str, str]
    out_of_memory: bool = False  # of one of them, or more


ORDERS: dict[tuple[torch.device, Case], Order] = {}
LATEST: dict[Case, Order] = {}  # for any length


def configure_attention(config, layer_class, x: torch.Tensor, attention_mask=None, cache=None) -> Any:
    """Return a copy of a `FoxConfig` whose "auto" is replaced by what computes a call fastest.

    Args:
        layer_class: `FoxAttention`.
        x: the embedded tokens, (B, T, hidden).
        attention_mask, cache: those of the call, or None.
    """
    if x.device.type not in MEASURED or config.forget_gate == "none" or is_transformed():
        return with_implementation(config, "sdpa")
    training, dtype = torch.is_grad_enabled(), autocast_dtype(x.device) or x.dtype
    work = "training" if training else "prefill" if x.shape[1] > DECODE_ROWS else "decoding"
    case = make_case(config, dtype, work)
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        names = list(LATEST[case].milliseconds) if case in LATEST else []
    else:
        names = rank(with_length(case, cached_length(cache) + x.shape[1]), config, layer_class, x.device)
    barred = []
    if training and config.attention_dropout > 0:
        barred.append(NAME)
    if isinstance(cache, AttendingCache) and attention_mask is not None and not attention_mask.all():
        barred.append(NAME)  # they cannot leave out padding between real tokens
    if cache is not None and type(cache) is not DynamicCache:
        barred += FLASH  # they would take free slots for tokens
    return with_implementation(config, next((name for name in names if name not in barred), "sdpa"))


def is_transformed() -> bool:
    """Return whether torch.func, or forward-mode differentiation, reads the call: not all kernels have derivatives."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def cached_length(cache) -> int:
    """Return how many tokens a cache holds; its slots, where only the GPU knows the tokens."""
    if cache is None:
        return 0
    length = cache.get_seq_length()
    return length if isinstance(length, int) else cache.layers[0].max_cache_len


def make_case(config, dtype: torch.dtype, work: str) -> Case:
    """Return the `Case` of calls of any length."""
    sizes, pruned = config.sizes, config.log_pruning_tolerance is not None
    group, gates = sizes.num_key_value_groups, sizes.gates_per_key
    return Case(dtype, sizes.head_dim, group, gates, config.sliding_window, pruned, work)


def with_length(case: Case, length: int) -> Case:
    """Return the case of a length: the power of two below it, from 128 to 2^16, beyond which the order stays."""
    return case._replace(length=min(max(1 << (length.bit_length() - 1), 128), 2**16))


def rank(case: Case, config, layer_class, device: torch.device) -> list[str]:
    """Return the implementations that are right, the fastest first; measure them if nobody has.

    Raises:
        RuntimeError: none of them is right.
    """
    if (device, case) not in ORDERS:
        key = f"{describe(device)}; {', '.join(f'{name} {value}' for name, value in case._asdict().items())}"
        with ExitStack() as stack:
            with suppress(OSError):  # where nobody can write, every process measures by itself
                FILE.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(WeakFileLock(FILE.with_suffix(".lock")))
            order = read_orders().get(key)
            if order is None:
                order = measure(case, config, layer_class, device)
                if order.milliseconds and not order.out_of_memory:  # of which only this process shall know
                    with suppress(OSError):
                        write_orders(read_orders() | {key: order})
        for name, error in order.wrong.items():
            logger.warning_once(
                f"attn_implementation={name!r} computes FoX wrongly on this machine and is not used: {error}."
            )
        ORDERS[device, case] = order
    LATEST[case._replace(length=0)] = order = ORDERS[device, case]
    if not order.milliseconds:
        raise RuntimeError(
            f"none of the attention implementations {CANDIDATES} computes FoX right on {describe(device)}: "
            f"{order.wrong or 'none runs'}. Use model.set_attn_implementation('eager')."
        )
    return list(order.milliseconds)


@functools.cache
def describe(device: torch.device) -> str:
    """Return GPU, versions of all that computes, and a hash of the files that travel with a FoX."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    own = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*_fox.py"))))
    versions = {
        "torch": torch.__version__,
        "cuDNN": torch.backends.cudnn.version(),
        "triton": getattr(triton, "__version__", None),
        "transformers": transformers.__version__,
        "FlashAttention": [name[-1] for name, available in FLASH.items() if available()],
        "FoX": own.hexdigest()[:12],
    }
    return ", ".join([gpu, *(f"{name} {version}" for name, version in versions.items())])


def read_orders() -> dict[str, Order]:
    """Return what the file holds; a damaged one holds nothing."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {key: Order(**order) for key, order in json.loads(FILE.read_text()).items()}
    return {}


def write_orders(orders: dict[str, Order]) -> None:
    """Replace the file in one step."""
    new = FILE.with_suffix(".new")
    new.write_text(json.dumps({key: order._asdict() for key, order in orders.items()}, indent=1) + "\n")
    new.replace(FILE)


def measure(case: Case, config, layer_class, device: torch.device) -> Order:
    """Compare every candidate with the definition, and time those that are right."""
    findings = examine(case, config, layer_class, device)
    times = {name: found.milliseconds for name, found in findings.items() if found.milliseconds is not None}
    return Order(
        dict(sorted(times.items(), key=lambda item: item[1])),
        {name: mistake for name, found in findings.items() if (mistake := found.mistake())},
        any(found.out_of_memory for found in findings.values()),
    )


def examine(case: Case, config, layer_class, device: torch.device, names=None, most=TIMED) -> dict[str, Finding]:
    """Return what is found of each candidate that is installed.

    names: of these only. most: tokens times key heads that are timed.
    """
    findings = {}
    on_gpu = device.type == "cuda"
    with (
        torch.cuda.device(device) if on_gpu else nullcontext(),  # the one that the clock waits for
        torch.random.fork_rng([device] if on_gpu else []),
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.set_grad_enabled(case.work == "training"),
    ):
        checks = [with_results(case, draw_for(case, *sizes, device)) for sizes in CHECKED]
        timed = draw_timed(case, config, device, most)
        for name in names or CANDIDATES:
            if name in FLASH and not FLASH[name]():
                continue
            try:
                if name in FLASH:
                    lazy_import_flash_attention(name)
                found = Finding(compare(name, case, config, layer_class, checks))
                if found.mistake() is None:
                    attention = attention_of(name, case, config, layer_class, timed)
                    milliseconds = 1e3 * seconds(lambda: compute(case, attention, timed))  # noqa: B023
                    found = found._replace(milliseconds=milliseconds)
            except Exception as error:  # it has no kernel for this GPU, dtype or width, or no memory is left
                found = Finding(
                    failure=f"{type(error).__name__}: {error}",
                    out_of_memory=isinstance(error, (torch.OutOfMemoryError, MemoryError)),
                )
                logger.info(f"attn_implementation={name!r} cannot compute FoX here: {found.failure}")
            findings[name] = found
    return findings


def draw_for(case: Case, batch: int, heads: int, length: int, device: torch.device) -> list[torch.Tensor]:
    """Return random q, k, v, log f, do with the norms that QK-norm gives; gates as many as the model has."""
    queries = length
    if case.work == "decoding":  # a cache drops what is outside of the window
        queries, length = 1, min(length, case.window or length)
    sizes = batch, heads * case.group, heads, queries, length, case.head_dim
    q, k, v, log_f, do = draw(*sizes, case.dtype, device=device)
    q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
    return [q, k, v, log_f[:, :: case.group // case.gates_per_key].contiguous(), do]


def timed_heads(case: Case, config, most: int) -> int:
    """Return how many key heads are timed: those of the model, or fewer of a long row."""
    return max(1, min(config.sizes.num_key_value_heads, most // case.length))


def draw_timed(case: Case, config, device: torch.device, most: int) -> list[torch.Tensor]:
    """Return what is timed: one row."""
    inputs = draw_for(case, 1, timed_heads(case, config, most), case.length, device)
    inputs[3] = slow_gates(inputs[3])
    return inputs


def slow_gates(log_f: torch.Tensor) -> torch.Tensor:
    """Return gates as of a trained model: half-lives of 2 tokens to the whole length, evenly on a log scale."""
    _, gates, length = log_f.shape
    half_lives = 2 * (length / 2) ** torch.linspace(0, 1, gates, device=log_f.device)
    return (-math.log(2) / half_lives)[:, None].expand_as(log_f).contiguous()


def compute(case: Case, attention, inputs) -> tuple[torch.Tensor, ...]:
    """Return the output, in training with gradients."""
    return run(attention, *inputs) if case.work == "training" else (attention(*inputs[:4]),)


def with_results(case: Case, inputs):
    """Return inputs, and the results of the definition as plain PyTorch rounds it and in float64."""

    def definition(q, k, v, log_f):
        log_f = log_f.repeat_interleave(case.group // case.gates_per_key, dim=1)  # for each query head
        return forgetting_attention_ref(q, k, v, log_f, window=case.window)

    with torch.enable_grad():
        plain, exact = (f(*inputs, definition=definition) for f in (run_plain, run_exact))
    return inputs, plain, exact


class Cached(NamedTuple):
    """The cached tokens, as a `CachedLayer`: none, or `keys` and `values`, which hold the new token already.

    before: c of the last cached token, (B, H, 1).
    """

    before: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    cache: None = None

    def decay(self, c):
        return self.before

    def append(self, k, v):
        return (k, v) if self.keys is None else (self.keys, self.values)


def attention_of(name: str, case: Case, config, layer_class, inputs):
    """Return a function of q, k, v and log f, of shapes as in `inputs`, that runs `name` as a layer does.

    Prefill fills a cache, whose keys are folded for all implementations.
    """
    q, k, v, log_f, _ = inputs
    config = with_implementation(config, name)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 1, q.shape[1], k.shape[1]
    layer = layer_class(config, 0).to(q.device, q.dtype).eval()
    call = Call(implementation=name)
    past = None
    if case.work == "decoding":
        c = running_sum(log_f)
        keys = fold_keys(k, c, layer.scaling)
        past = Cached(c[..., -2:-1], keys, F.pad(v, (0, keys.shape[-1] - v.shape[-1])))
    else:
        call = read_call(config, q.new_zeros(len(q), q.shape[2], 1), None, None, None)
        if case.work == "prefill":
            past = Cached(torch.zeros_like(log_f[..., :1]))

    def attention(q, k, v, log_f):
        k, v, log_f = (x[:, :, -q.shape[2] :] for x in (k, v, log_f))
        o, _ = attend(layer, q, k, v, log_f, call, past)  # ty: ignore[invalid-argument-type] - what it reads of a cache
        return o[..., : case.head_dim].transpose(1, 2)

    return attention


def compare(name: str, case: Case, config, layer_class, checks) -> dict[str, tuple[float, float]]:
    """Return the `errors` of a `Finding`: for each result, of the check in which it uses most of its budget."""
    worst = {}
    for inputs, plain, exact in checks:
        fast = compute(case, attention_of(name, case, config, layer_class, inputs), inputs)
        limits = {}
        if name != NAME:  # logits hold c_j in place of c_i - c_j; gradients of keys are rounded, then summed up
            limits["resolution"] = EPS * inputs[3].sum(-1).abs().max().item()
            limits["dlog_f"] = FOLDED_DLOG_F[case.dtype]
        elif case.pruned:
            limits["resolution"] = 2 * math.exp(config.log_pruning_tolerance)
        errors = find_errors(fast, plain, exact, inputs, **limits)
        for (result, (error, _, allowed)), x in zip(errors.items(), exact):
            pair = tuple(y / x.norm().item() for y in (error, allowed))
            if result not in worst or not pair[0] / pair[1] <= worst[result][0] / worst[result][1]:
                worst[result] = pair
    return worst


def seconds(function) -> float:
    """Return the median time of a call that is waited for."""
    from torch.utils.benchmark import Timer  # whose import takes a second

    function()  # compiles
    return Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=0.1).median
