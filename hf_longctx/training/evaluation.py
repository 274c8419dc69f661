"""Loss and retrieval at a longer context: loss alone does not show its worth (arXiv 2405.14591, section 4)."""

import warnings
from itertools import islice
from pathlib import Path

from torch.utils.data import IterableDataset

from ..metrics import line_retrieval, position_loss
from ..metrics.run.distributed import process_rank
from ..metrics.tasks.lines import line_counts


ROWS = 4
REPEATS = 5  # records of each number of lines


def measure(model, tokenizer, rows, length: int, folder: Path) -> str:
    """Save loss by position and retrieval from `length` tokens in a folder, and summarize them in one line."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [token for row in first_rows(rows, ROWS) for token in row["input_ids"].tolist()]
    counts = line_counts(length, lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*more than the .* claims to support")  # which is what is measured
        loss = position_loss(model.eval(), tokens, context_length=length, sequences=ROWS, tokenizer=tokenizer)
        lines = line_retrieval(model, tokenizer, lines=counts, repeats=REPEATS, replies=False)
    if process_rank() == 0:
        loss.save(folder / "loss.json")
        lines.save(folder / "lines.json")
    return f"{loss.summary()}; {lines.summary()}"


def first_rows(rows, count: int) -> list[dict]:
    """Return the first rows of a dataset, streamed or not."""
    if isinstance(rows, IterableDataset):
        return list(islice(rows, count))
    return [rows[i] for i in range(min(count, len(rows)))]


__all__ = ["measure"]
