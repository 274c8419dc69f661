"""What the Triton kernels know of masks: the first key that each query sees.

Padding, packed sequences and a window say so (`first_visible_key`), and so does adaptive computation pruning (arXiv
2504.06949): the gates have forgotten what lies before (`first_kept_key`), which `count_pruned_blocks` counts.
"""

import contextlib
from collections.abc import Callable

import torch

from .tiles_fox import Tile


def _require(holds: torch.Tensor, error: type[Exception], explain: Callable[[], str]) -> None:
    """Raises `error` unless `holds`; inside torch.compile, where values are unknown, the device asserts it instead."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, "attention_mask has holes, or cu_seqlens does not rise from 0 to the token count")
    elif not holds:
        raise error(explain())


def first_visible_key(
    Tq: int,
    Tk: int,
    *,
    attention_mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor | None:
    """The first key that each query sees: padding, packing and window as one integer per row.

    Compute it once per forward pass and hand it to every layer as `first_key`; checking a mask or `cu_seqlens` waits
    for the device once.

    Args:
        Tq, Tk: number of queries and keys; query i sits at position Tk - Tq + i.
        attention_mask: (B, Tk), nonzero for real tokens, which must be contiguous in each row.
        starts, lengths: (B,) integers, the same thing in numbers: row b holds real tokens at starts[b] <= t <
            starts[b] + lengths[b]. Defaults: 0, and up to the end. They are clamped to the row.
        cu_seqlens: (N + 1,) integers 0 ... Tk, borders of sequences packed into a batch of one. Needs Tq == Tk.
        window: number of most recent keys that a query sees, itself included.
        device: where to put the result if no tensor is given.

    Returns:
        int32, (B or 1, 1, Tq), not decreasing along each row; a position past the query's own means that it sees
        nothing. None if every query sees everything before it.

    Raises:
        ValueError: more than one description of the sequences, or one that does not fit Tq and Tk.
        NotImplementedError: real tokens on both sides of a padding token.
    """
    described = {
        "attention_mask": attention_mask,
        "starts/lengths": starts if lengths is None else lengths,
        "cu_seqlens": cu_seqlens,
    }
    given = [name for name, x in described.items() if x is not None]
    if len(given) > 1:
        raise ValueError(
            f"Got {' and '.join(given)}; pass one of them, since each says where sequences begin and end."
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the keys a query sees, itself included, so it starts at 1.")

    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] != Tk:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (B, {Tk}), one entry per key, "
                "those in the cache included."
            )
        real = attention_mask.bool()
        starts, lengths = real.int().argmax(-1), real.sum(-1)
        t = torch.arange(Tk, device=real.device)
        holes = real != ((t >= starts[:, None]) & (t < (starts + lengths)[:, None]))
        _require(
            ~holes.any(),
            NotImplementedError,
            lambda: (
                f"attention_mask has padding between real tokens (row {int(holes.any(-1).int().argmax())}); the "
                "Triton backend takes padding on the left and on the right only. Use another backend, or pack."
            ),
        )
        if window is None and not torch.compiler.is_compiling() and real.all():
            return None

    if starts is not None or lengths is not None:
        starts = torch.zeros_like(lengths) if starts is None else starts.clamp(min=0)
        stops = torch.full_like(starts, Tk) if lengths is None else (starts + lengths).clamp(max=Tk)
        i = torch.arange(Tk - Tq, Tk, device=starts.device)
        first = torch.where(i < stops[:, None], starts[:, None], Tk)
    elif cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or Tq != Tk:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, with {Tq} queries and "
                f"{Tk} keys; it must be a vector of integers, with as many queries as keys."
            )
        _require(
            (cu_seqlens[0] == 0) & (cu_seqlens[-1] == Tk) & (cu_seqlens.diff() >= 0).all(),
            ValueError,
            lambda: (
                f"cu_seqlens is {cu_seqlens.tolist()}; it must rise from 0 to the {Tk} packed tokens, because every "
                "token belongs to one sequence."
            ),
        )
        i = torch.arange(Tk, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        first = cu_seqlens[torch.searchsorted(cu_seqlens, i, right=True) - 1][None]
    elif window is not None:
        i = torch.arange(Tk - Tq, Tk, device=device)
        first = torch.zeros_like(i)[None]
    else:
        return None
    if window is not None:
        first = torch.maximum(first, i - window + 1)
    return first[:, None].int()


def stop_query(first_key: torch.Tensor, Tk: int) -> torch.Tensor:
    """The transpose of `first_key`: one past the last query that sees each key, 0 for none. int32, (b, h, Tk)."""
    keys = torch.arange(Tk, device=first_key.device, dtype=torch.int32).expand(*first_key.shape[:2], Tk)
    count = torch.searchsorted(first_key.contiguous(), keys.contiguous(), right=True, out_int32=True)
    return torch.where(count > 0, count + (Tk - first_key.shape[-1]), 0).int()


def first_kept_key(
    c: torch.Tensor, threshold: torch.Tensor, Tq: int, query_block: int, key_block: int
) -> torch.Tensor:
    """Adaptive computation pruning (arXiv 2504.06949): the first key that each block of queries still has to read.

    A key block that ends at e is dropped for the query block that starts at r if c_r - c_e < threshold. c falls, so
    the dropped blocks are a prefix, found by bisection, and the prefix grows from one query block to the next.

    Args:
        c: float64 running sum of log f, (B, H, Tk).
        threshold: (B, H), at most 0.
        Tq, query_block, key_block: the queries are the last Tq positions, cut into blocks from the first of them.

    Returns:
        int64, (B, H, ceil(Tq / query_block)), multiples of key_block, at most the block's own position.
    """
    Tk = c.shape[-1]
    rows = torch.arange(Tk - Tq, Tk, query_block, device=c.device)
    ends = torch.arange(key_block, Tk + key_block, key_block, device=c.device).clamp(max=Tk) - 1
    # Where c or the threshold is no number, nothing is known to be forgotten.
    faded = (-c[..., ends]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    needed = (threshold.double()[..., None] - c[..., rows]).nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    dropped = torch.searchsorted(faded, needed)
    return torch.minimum(dropped * key_block, rows)


def bound_from_norms(q, k, scale, first_key, stop) -> torch.Tensor:
    """(B, Hq): upper bound of |scale * q.k| from the largest norms of the rows that take part."""
    rows = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32)  # (B, Hq, Tq)
    keys = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32)  # (B, Hkv, Tk)
    if first_key is not None:  # padding may hold anything
        t = torch.arange(k.shape[2], device=k.device)
        rows = torch.where(first_key <= t[k.shape[2] - q.shape[2] :], rows, 0.0)
        keys = torch.where(stop > t, keys, 0.0)
    return rows.amax(-1) * keys.amax(-1).repeat_interleave(q.shape[1] // k.shape[1], 1) * abs(scale)


def bound_per_head(q, logit_bound: torch.Tensor | float) -> torch.Tensor:
    """A bound that broadcasts to (B, Hq), as the kernels read it: fp32, contiguous."""
    return torch.as_tensor(logit_bound, device=q.device, dtype=torch.float32).expand(q.shape[:2]).contiguous()


def pruning_threshold(q, Tk: int, tolerance: float, logit_bound) -> torch.Tensor:
    """(B, Hq) fp32: what the decay must fall below so that all that is pruned weighs at most e^tolerance of a row."""
    bound = bound_per_head(q, logit_bound)
    return tolerance - 2 * bound - bound.new_full((), Tk).log()  # math.log would fix Tk in a compiled graph


class PrunedBlocks:
    """Tally of `count_pruned_blocks`: blocks of the forward tile, over all heads, rows and calls so far."""

    def __init__(self):
        self._pruned = self._total = 0

    def add(self, first_key: torch.Tensor | None, pruned_from: torch.Tensor, Tk: int, tile: Tile) -> None:
        """Counts one call: key blocks of each query block under `first_key`, and those that `pruned_from` drops."""
        Tq = pruned_from.shape[-1]
        stops = torch.arange(Tk - Tq, Tk, tile.BM, device=pruned_from.device).add(tile.BM).clamp(max=Tk)
        begin = pruned_from[..., :: tile.BM]
        before = torch.zeros_like(begin) if first_key is None else first_key[..., :: tile.BM].expand_as(begin)
        blocks = ((stops - before).clamp(min=0) + tile.BN - 1) // tile.BN
        kept = ((stops - begin).clamp(min=0) + tile.BN - 1) // tile.BN
        self._total = self._total + blocks.sum()
        self._pruned = self._pruned + (blocks - kept).sum()

    @property
    def total(self) -> int:
        """Blocks that causality, padding and window leave to compute."""
        return int(self._total)

    @property
    def pruned(self) -> int:
        """How many of them were not computed."""
        return int(self._pruned)


_tallies: list[PrunedBlocks] = []


def tally_pruned(first_key: torch.Tensor | None, pruned_from: torch.Tensor, Tk: int, tile: Tile) -> None:
    """`PrunedBlocks.add` for everyone who counts."""
    for tally in _tallies:
        tally.add(first_key, pruned_from, Tk, tile)


@contextlib.contextmanager
def count_pruned_blocks():
    """Counts what adaptive computation pruning leaves out: `with count_pruned_blocks() as blocks: model(x)`, then read
    `blocks.pruned` and `blocks.total`. The tally stays on the device until then. A compiled model is not counted.
    """
    tally = PrunedBlocks()
    _tallies.append(tally)
    try:
        yield tally
    finally:
        _tallies.remove(tally)
