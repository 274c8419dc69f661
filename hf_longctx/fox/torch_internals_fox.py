"""The private names of PyTorch that FoX uses. No other file of FoX uses private names of PyTorch."""

from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


# Whether a transform of torch.func (such as vmap or jvp) is active. There is no public function.
is_transforming = torch._C._are_functorch_transforms_active
# Raise RuntimeError on the device if a condition is False. `torch._check` checks shapes only, and there is no public
# function. An `assert` would wait for the GPU.
assert_async = torch._assert_async
# Whether the zeros of a tensor have no memory. There is no public function.
is_zerotensor = torch.Tensor._is_zerotensor
# By the type of a device: a function (sizes, strides, dtype) that allocates a tensor on the current device. The
# functions are Inductor's. They take half as long as `torch.empty_strided`, because they skip the dispatcher.
_guards: Any = torch._C._dynamo.guards
allocate = {"cuda": _guards._empty_strided_cuda, "cpu": _guards._empty_strided_cpu}
# The hooks of a module. There is no public function that lists them.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_exporting() -> bool:
    """Return whether `torch.export` is tracing.

    torch.compiler.is_exporting can replace this function when PyTorch 2.11, which compiles it to True, is too old.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active.

    The public `forward_ad.unpack_dual` answers this for one tensor, and a model has too many to ask.
    """
    return forward_ad._current_level >= 0


def mark_static(*tensors: torch.Tensor) -> None:
    """Declare that these tensors will keep their addresses, so that CUDA graphs may write to them.

    There is no public function.
    """
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


__all__ = [
    "MODULE_HOOKS",
    "FakeTensor",  # the type of tensors without data; torch.compiler.is_compiling does not tell of them
    "FunctionalTensor",  # the type of tensors that AOTAutograd traces
    "allocate",  # memory for tensors, with little work on the host
    "assert_async",
    "is_exporting",
    "is_in_forward_mode",
    "is_in_torch_dispatch_mode",  # whether a mode such as `FakeTensorMode` intercepts operators
    "is_legacy_batchedtensor",  # whether a tensor is batched by the vmap of `is_grads_batched`
    "is_transforming",
    "is_zerotensor",
    "mark_static",
]
