"""Speed up Triton's interpreter, which runs the kernels if there is no GPU. Import this file before Triton.

The interpreter replaces the functions of Triton's language in each call of a kernel or of a function in a kernel, each
time with the same functions. It checks every sum of integers for overflow without reporting it, and it recreates the
type and shape of each intermediate result. We avoid this by replacing private functions. If a function has moved, the
kernels run slowly.
"""

import contextlib
import functools
import math
import os
from types import SimpleNamespace

import torch


def replace_once(interpreter):
    """Replace the functions of Triton's language once for each module, and pass their arguments directly."""
    replace, done = interpreter._patch_lang, set()

    def _patch_lang(function):
        if function.__module__ not in done:
            replace(function)
            done.add(function.__module__)
        return SimpleNamespace(restore=lambda: None)

    def _patch_attr(owner, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)  # the wrapper checks that `_semantic` is passed

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_lang, interpreter._patch_attr = _patch_lang, _patch_attr


def remember_types(interpreter):
    """Make what depends on types and shapes alone once."""
    core, dtypes, blocks = interpreter.tl.core, {}, {}
    find_dtype, equal = interpreter._get_np_dtype, core.dtype.__eq__
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    convert = interpreter.TritonSemantic.binary_op_type_checking_impl

    def _get_np_dtype(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find_dtype(dtype)
        return dtypes[dtype.name]

    def with_element_ty(self, element_ty):
        key = element_ty.name, *self.shape.values
        if key not in blocks or blocks[key].element_ty != element_ty:
            blocks[key] = core.block_type(element_ty, self.shape)
        return blocks[key]

    @functools.cache
    def describe(*shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = describe(*(type.shape.values if type.is_block() else ()))

    def broadcast_impl_value(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() == b.is_block() and (a is b or not a.is_block() or a.shape.values == b.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and not (div_or_mod or lhs.dtype.is_ptr()):
            return broadcast_impl_value(self, lhs, rhs)
        return convert(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    interpreter._get_np_dtype = _get_np_dtype
    interpreter.TensorHandle.__post_init__ = lambda self: None
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    interpreter.TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.tensor.__init__ = make_tensor
    core.block_type.with_element_ty = with_element_ty
    core.block_type.to_ir = lambda self, builder: self


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides at its import, and transformers imports it
    with contextlib.suppress(ImportError, AttributeError):
        from triton.runtime import interpreter

        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        replace_once(interpreter)
        remember_types(interpreter)
