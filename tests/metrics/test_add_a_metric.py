"""The metric of CONTRIBUTING.md is a single file: function, command, journal, page, card and task of lm-eval."""

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from demo_model import DEMO
from tiny_models import tiny_llama


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli
from hf_longctx.cli.task_command import TaskCommand
from hf_longctx.metrics import Run, measure_all, read_result, write_report
from hf_longctx.metrics.report.card import eval_results
from hf_longctx.metrics.report.comparison import compare
from hf_longctx.metrics.result import Result
from hf_longctx.metrics.task import Counts, Task


GUIDE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILE = re.search(r"^## Add a metric\n.*?^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def model():
    return tiny_llama(vocab_size=64)


@pytest.fixture
def added(monkeypatch):
    """Return the module of the file in CONTRIBUTING.md. It is unregistered after the test."""
    monkeypatch.setitem(Task.tasks, "repeats", None)
    monkeypatch.setitem(Result.kinds, "repeats", None)
    module = ModuleType("repeats")
    monkeypatch.setitem(sys.modules, "repeats", module)
    exec(compile(FILE, "repeats.py", "exec"), module.__dict__)
    monkeypatch.setitem(cli.COMMANDS, "repeats", TaskCommand(module.Repeats))  # the import of the package does this
    return module


def test_the_numbers_are_those_of_a_plain_loop(added, model):
    for n, right in added.repeats(model, lengths=[16, 32]).scores.items():
        ids = np.append(1, np.random.default_rng(0).integers(10, 64, n - 1))
        ids = torch.from_numpy(np.tile(ids, 2))[None]
        with torch.no_grad():
            predictions = model(ids).logits.argmax(-1)
        assert right == (predictions[0, n:-1] == ids[0, n + 1 :]).sum()


def test_a_run_resumes_from_its_journal(added, model, tmp_path):
    journal = tmp_path / "repeats.jsonl"
    result = added.repeats(model, run=Run(journal))
    whole = journal.read_bytes()
    journal.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert added.repeats(model, run=Run(journal)) == result
    assert journal.read_bytes() == whole


@pytest.mark.usefixtures("undrawn")
def test_the_result_is_saved_read_and_drawn_and_has_its_place_in_page_and_card(added, model, tmp_path):
    result = added.repeats(model)
    result.save(tmp_path / "repeats.json")
    assert read_result(tmp_path / "repeats.json") == result
    write_report([result], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert result.title in page and result.summary() in page and page.count("<img") == 1
    assert eval_results([result])[0].metric_name == "repeated sequence of 32 tokens"


def test_models_are_compared_by_what_its_result_counts(added, tmp_path):
    class Counted(added.RepeatsResult):
        verb = "repeats"

        def by_length(self, replies=True, overlapping=False):
            return [
                Counts(n, np.repeat([1.0, 0.0], [right, 8 - right]), 1, n, 8, right)
                for n, right in self.scores.items()
            ]

        def places(self):
            return {n: [] for n in self.scores}

    results = {"one": Counted({16: 0, 32: 8}), "other": Counted({16: 8, 32: 8})}
    text = compare(results, tmp_path / "both.md")
    assert "other repeats more than one at 1 of 2 lengths, 16 tokens" in text and "| one | 0.0% | 100.0% |" in text
    assert "The effective length of other is unknown from 8 samples per length." in text and "RULER: 29" in text


@pytest.mark.usefixtures("undrawn")
def test_it_is_in_the_report(added, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "tasks", {"repeats": added.Repeats})
    written = measure_all(model, None, [1, 2, 3], tmp_path)
    assert [*written.results] == ["repeats", "rope"] and not written.missing
    files = {"repeats.json", "repeats.png", "report.html"}
    assert files <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.usefixtures("undrawn", "added")
def test_its_command_has_help_and_checks_and_writes(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["repeats", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "when it reads the sequence again" in told and "in tokens (default: 32, 128)" in told
    assert cli.main(["repeats", str(DEMO), "--lengths", "1"]) == 2
    assert "lengths must be at least 2, got 1" in capsys.readouterr().err
    assert cli.main(["repeats", str(DEMO), "--lengths", "8", "16", "--output", str(tmp_path / "a")]) == 0
    assert [*read_result(tmp_path / "a.json").scores] == [8, 16]


def test_it_is_a_task_of_lm_eval(added, model):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'hf-longctx[lm-eval]'")
    import lm_eval
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    from hf_longctx.lm_eval import tasks_folder
    from hf_longctx.lm_eval.model import LongContextLM

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    lm = LongContextLM(pretrained=model, tokenizer=tokenizer, device="cpu")
    manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata={"lengths": [8, 16]})
    results = lm_eval.simple_evaluate(lm, tasks=["repeats"], task_manager=manager)["results"]["repeats"]
    expected = added.repeats(model, tokenizer=tokenizer, lengths=[8, 16]).rates
    assert results["repeated_sequence_of_16_tokens,none"] == pytest.approx(expected[16], abs=1e-4)
