"""Generate the Python function of a task, such as `forgetting_curve`, from the class of the task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .task import Subject, Task, options


def function(task: type[Task]) -> Callable[..., Any]:
    """Return the Python function of a task: `measure(model, [tokenizer,] [tokens,] *, ..., run=None)`.

    The keyword arguments are the task's options and the arguments of `Subject`, except `context`.
    """
    data = ["model", *["tokenizer"] * task.asks, *["tokens"] * task.reads_text]
    kept = [p for p in inspect.signature(Subject).parameters.values() if p.name not in (*data, "context", "tokens")]
    of_task = [entry.name for entry in options(task)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in data]
    parameters += [
        inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default) for entry in options(task)
    ]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    parameters.append(inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY, default=None))
    signature = inspect.Signature(parameters)

    def measure(*arguments: Any, **keywords: Any) -> Any:
        from .run.runner import run as run_task  # imports PyTorch

        given = signature.bind(*arguments, **keywords).arguments
        run, chosen = given.pop("run", None), {name: given.pop(name) for name in of_task if name in given}
        return run_task(task(**chosen), Subject(**given), run)

    lines = [f"    {name}: see `Subject`." for name in ("model", *data[1:], *(p.name for p in kept))]
    lines += [f"    {entry.name}: {entry.help}." for entry in options(task)]
    measure.__doc__ = (
        f"{inspect.getdoc(task)}\n\nArgs:\n"
        + "\n".join(lines)
        + "\n    run: journal, memory budget and progress bar; see `Run`.\n\nReturns:\n"
        f"    `{task.result.__name__}`. If an exception ends the run early, the exception's attribute `result` is the "
        "partial result.\n\n"
        "Raises:\n    ValueError: one of: an argument is invalid; nothing could be measured; a logit is NaN. Invalid "
        "arguments\n        raise the error before the model runs.\n"
    )
    measure.__signature__ = signature  # ty: ignore[missing-attribute]
    return measure
