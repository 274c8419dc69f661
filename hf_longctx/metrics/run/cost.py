"""The number of requests that a measurement sends to a server, without measuring."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..task import Ask, Predict, Task


LOG_PROBS = "the server reports log-probabilities of prompt tokens: one per input, and one per response"
IDS = "it completes prompts with token ids: one per wrong prediction, and a few per input"
TEXT = "it completes prompts with text: one per scored token"


def request_counts(task: Task) -> Counter[str]:
    """Return the maximum number of requests, keyed by what the server returns.

    Completions only support forgetting curves. The result then has all three keys. The requests of `probes` are not
    included.

    Args:
        task: a task with its subject; see `Task.on`.
    """
    limit = task.subject.reader.position_limit
    counts = Counter()
    for trial in task.all_trials():
        if limit is not None and trial.tokens > limit:
            continue
        for request in task.requests(trial.key):
            if isinstance(request, Predict):  # equal rows are sent once
                rows = len(np.unique(request.rows, axis=0))
                counts += {LOG_PROBS: rows, IDS: rows * len(request.positions), TEXT: rows * len(request.positions)}
            else:
                counts[LOG_PROBS] += 1 + (isinstance(request, Ask) and request.reply > 0)
    return counts
