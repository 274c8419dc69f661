"""Where there is no GPU, Triton interprets its kernels; import this before Triton. Here it is three times as fast.

By itself, the interpreter replaces the functions of Triton's language at each call of a kernel and of a function in
one, each time by the same; and it computes for each sum of integers whether it overflows, to tell nobody. What is
replaced here is private: `test_hooks.py` says when it has moved, and the kernels are then interpreted slowly.
"""

import contextlib
import os
from types import SimpleNamespace

import torch


def speed_up(interpreter):
    replace, done = interpreter._patch_lang, set()

    def replace_once(function):
        if function.__module__ not in done:
            replace(function)
            done.add(function.__module__)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides at its import, and transformers imports it
    with contextlib.suppress(ImportError, AttributeError):
        from triton.runtime import interpreter

        speed_up(interpreter)
