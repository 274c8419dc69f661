"""The metric of CONTRIBUTING.md runs, resumes, is saved, read, drawn and reported like those that come with us."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import Run, card_snippet, read_result, write_report
from hf_longctx.metrics.report import measure_all as report
from hf_longctx.metrics.result import Result


GUIDE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"^## Add a metric\n.*?^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512, bos_token_id=1))


@pytest.fixture
def example(model, monkeypatch):
    """What the block of CONTRIBUTING.md defines, and its `result` on a tiny model with random weights."""
    monkeypatch.setitem(Result.kinds, "repeats", None)  # registered by the block, and forgotten after the test
    names = {"model": model}
    exec(re.sub(r"^model = .*\n", "", EXAMPLE, flags=re.MULTILINE), names)
    return names


def test_the_numbers_are_those_of_a_plain_loop(example, model):
    rng = np.random.default_rng(0)
    for n, correct in example["result"].correct.items():
        ids = torch.from_numpy(np.tile(rng.integers(10, 64, n), 2))[None]
        with torch.no_grad():
            predictions = model(ids).logits.argmax(-1)
        assert correct == (predictions[0, n:-1] == ids[0, n + 1 :]).sum()


def test_a_run_goes_on_from_its_journal(example, model, tmp_path):
    journal = tmp_path / "repeats.jsonl"
    result = example["repeats"](model, lengths=[32, 128], run=Run(journal))
    assert result == example["result"]
    whole = journal.read_bytes()
    journal.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert example["repeats"](model, lengths=[32, 128], run=Run(journal)) == result
    assert journal.read_bytes() == whole


@pytest.mark.usefixtures("undrawn")
def test_the_result_is_saved_read_and_drawn_and_has_its_place_in_page_and_card(example, tmp_path):
    result = example["result"]
    result.save(tmp_path / "repeats.json")
    assert read_result(tmp_path / "repeats.json") == result
    write_report([result], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert result.title in page and result.summary() in page and page.count("<img") == 1
    assert "repeated text of 128 tokens" in card_snippet("tiny", [result])


@pytest.mark.usefixtures("undrawn")
def test_one_function_and_one_entry_put_it_into_the_report(example, model, tmp_path, monkeypatch):
    def measure_repeats(subject, run):
        return example["repeats"](subject.reader, lengths=[32], seed=subject.seed, run=run)

    monkeypatch.setattr(report, "METRICS", {"repeats": (example["Repeats"], measure_repeats)})
    written = report.measure_all(model, None, [1, 2, 3], tmp_path)
    assert [*written.results] == ["repeats"] and not written.missing
    assert {"repeats.json", "repeats.png", "report.html", "model_card.md"} <= {
        path.name for path in tmp_path.iterdir()
    }
