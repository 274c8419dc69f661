"""Launches of Triton kernels, and their repetition with little work on the host.

A *launcher* allocates its outputs (`fresh`) and runs its kernels (`launch`). It does nothing else with tensors. For
short sequences, a GPU waits for the host: to launch a kernel, Triton binds its arguments, and the launcher computes
strides, tiles and shapes. None of this changes if the next call has tensors of the same layout. `repeat` therefore
records the first call for each layout as a `Plan`, and repeats the plan for the calls that follow.
"""

import contextlib
import threading
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, library

from .kernels_fox import INTERPRETED, triton
from .tiles_fox import Tile
from .torch_internals_fox import FakeTensor, FunctionalTensor, allocate


driver: Any = None if triton is None else triton.runtime.driver
MAX_PLANS = 1024  # a layout is a few hundred bytes


def on(device: torch.device):
    """Return a context in which `device` is the current GPU."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. For a CPU, return 4: it runs the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def blocks_of(size: int, n: int) -> int:
    """Return ceil(n / size). It is several times faster on the host than triton.cdiv."""
    return -(-n // size)


def launch_options(tile: Tile) -> dict:
    # By default, Triton 3.10 does not fuse products with sums. This costs an instruction per logit. Inductor supports
    # the other two options only. With Triton 3.10, the kernels will therefore have to set `enable_fp_fusion`.
    return dict(num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)


class Plan:
    """The memory that a launcher allocated, and the kernels that it launched.

    Args:
        tensors: the arguments of the recorded call that are tensors.
    """

    def __init__(self, tensors: list[Tensor]):
        self.tensors, self.memory, self.launches = tensors, [], []
        self.kernels: list = []  # held here, because Triton 3.9 unloads a kernel that is no longer in its cache

    def finish(self, outputs) -> bool:
        """Replace the recorded tensors by their places. Return whether the plan can be repeated.

        It cannot if a kernel or the caller received a tensor whose memory is neither that of an argument nor `fresh`,
        or if two arguments shared their memory.
        """
        places = {x.data_ptr(): i for i, x in enumerate(self.tensors)}
        self.numbers: list = []

        def place(x):
            if isinstance(x, Tensor):
                return places[x.data_ptr()]
            self.numbers.append(x)
            return len(self.tensors) + len(self.numbers) - 1

        complete = len(places) == len(self.tensors)
        try:
            self.launches = [(run, itemgetter(*map(place, values))) for run, values in self.launches]
            self.outputs = itemgetter(*map(place, outputs))
        except KeyError:
            complete = False
        del self.tensors
        return complete and bool(self.launches)

    def run(self, tensors: list[Tensor]) -> tuple:
        """Repeat the call with other tensors of the same layout."""
        device = tensors[0].device
        with on(device):
            memory = [allocate[device.type](*layout) for layout in self.memory]
            values = [*tensors, *memory, *self.numbers]
            stream = None if INTERPRETED.value else driver.active.get_current_stream(device.index)
            for run, pick in self.launches:
                run(stream, *pick(values))
        return self.outputs(values)


class Recording(threading.local):
    plan: Plan | None = None


recording = Recording()


def fresh(x: Tensor) -> Tensor:
    """Return `x`, memory that a launcher has just allocated and that a plan has to allocate, too."""
    if (plan := recording.plan) is not None:
        plan.tensors.append(x)
        plan.memory.append((tuple(x.shape), x.stride(), x.dtype))
    return x


def launch(kernel, programs: int, tile: Tile, *args, **constants) -> None:
    """Run a kernel. Under tracing, add it to AOTAutograd's graph. The kernel's first argument must be a tensor."""
    if isinstance(args[0], FunctionalTensor):
        kernel = library.wrap_triton(kernel)
    elif isinstance(args[0], FakeTensor) or args[0].is_meta:
        return
    with on(args[0].device):
        compiled = kernel[(programs,)](*args, **launch_options(tile), **constants)
    if (plan := recording.plan) is not None:
        values = *args, *(constants[name] for name in kernel.arg_names[len(args) :])
        if compiled is None:  # from the interpreter
            run = lambda stream, *values: kernel[(programs,)](*values)  # noqa: E731
        else:  # `CompiledKernel.__getitem__` does the same, and calls the hooks of a profiler
            run = partial(compiled.run, programs, 1, 1)
            values = compiled.function, compiled.packed_metadata, None, None, None, *values
            plan.kernels.append(compiled)
        plan.launches.append((run, values))


PLANS: dict[tuple, Plan | None] = {}


def repeat(launcher, *args) -> tuple:
    """Return `launcher(*args)`, a tuple, with the plan for this launcher and the layout of its arguments.

    A layout includes everything that the launcher and Triton read from a tensor: shape, strides, dtype, device and
    alignment.
    """
    key = (launcher, args[0].device, *[
        (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in args
    ])  # fmt: skip
    plan = PLANS.get(key)
    if plan is not None:
        return plan.run([x for x in args if isinstance(x, Tensor)])
    if key in PLANS:  # the launcher cannot be repeated
        return launcher(*args)
    recording.plan = plan = Plan([x for x in args if isinstance(x, Tensor)])
    try:
        outputs = launcher(*args)
    finally:
        recording.plan = None
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[key] = plan if plan.finish(outputs) else None
    return outputs
