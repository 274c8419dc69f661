"""scripts.evidence.corpus and scripts.evidence.pretraining at tiny sizes, by the code that runs on a GPU."""

import json
import multiprocessing.pool
import zipfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hf_longctx.cli import main


pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'hf-longctx[plot]'")

SIZES = "hidden_size=32 num_hidden_layers=1 num_attention_heads=2 intermediate_size=32"
TINY = "--tokens 256 --length 32 --rows 2 --documents 7 --repeats 1 --prompts 400 --lines 1 2 --minutes 9"


@pytest.fixture
def corpus(load, tmp_path, monkeypatch):
    """Collect and pack sources of the standard library, as the wheels of two packages."""
    corpus = load("corpus")
    monkeypatch.setattr(corpus.multiprocessing, "Pool", multiprocessing.pool.ThreadPool)
    files = [
        file for file in sorted(Path(json.__file__).parents[1].glob("*.py")) if 7000 < file.stat().st_size < 14000
    ]
    (tmp_path / "code" / "wheels").mkdir(parents=True)
    for package, some in {"some_package": [*files[:6], files[0]], "other": [*files[6:14], files[0]]}.items():
        with zipfile.ZipFile(tmp_path / "code" / "wheels" / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            for i, file in enumerate(some):
                wheel.write(file, f"{i}/{file.name}")
    folder = ["--folder", str(tmp_path / "code"), "--processes", "2"]
    sizes = "--packages some-package absent --held-out other --vocabulary 300 --held-out-length 6000"
    asked = []
    monkeypatch.setattr(corpus, "subprocess", SimpleNamespace(run=lambda command, check: asked.append(command[-1])))
    corpus.main(["collect", *folder, *sizes.split()])
    assert asked == ["absent"]
    corpus.main(["pack", *folder, "--row-length", "256"])
    return corpus


class Now:
    """An executor that runs a function when it is submitted, because signals need the main thread."""

    def __init__(self, workers):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


@pytest.fixture
def pretraining(load, corpus, monkeypatch):
    """Return the script `pretraining`, which then trains in this process."""
    module = load("pretraining")
    monkeypatch.setattr(module, "ThreadPoolExecutor", Now)

    def popen(command, **options):
        assert main(list(map(str, command[3:]))) == 0
        return SimpleNamespace(wait=lambda limit: 0)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=popen))
    return module


def test_documents_are_read_once_and_held_out_by_project(corpus, tmp_path):
    folder = tmp_path / "code"
    facts = json.loads((folder / "sources.json").read_text())
    documents = [document for file in folder.glob("train-*.xz") for document in corpus.read_documents(file)]
    held_out = corpus.read_documents(folder / "held_out.xz")
    assert len(documents) == len(set(documents)) and not set(documents) & set(held_out)
    assert facts["characters"] == {"some-package": sum(map(len, documents))}
    tokens, rows = np.load(folder / "train.npy"), np.load(folder / "held_out-256.npy")
    assert (tokens == 0).sum() == len(documents) and rows.shape == (len(held_out), 256) and (rows != 0).all()


def result_of(module, options, tmp_path):
    """Return the result of an experiment at tiny sizes, by the rows of its models."""
    folders = f"--data {tmp_path}/code --work {tmp_path}/work --output {tmp_path}/x.json --picture {tmp_path}/x.png"
    module.main([*folders.split(), *f"{TINY} {options}".split()])
    result = json.loads((tmp_path / "x.json").read_text())
    assert str(tmp_path) not in json.dumps(result["settings"] | {"model": ""})
    return {row["model"]: row for row in result["rows"]}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.filterwarnings("ignore:.*claims to support only")
def test_a_trend_compares_models_at_equal_steps_of_one_seed(load):
    """A training of less than five steps is not compared."""
    rows = [
        {"model": model, "seed": seed, "training_losses": [seed + slope * step for step in range(steps)]}
        for model, seed, slope, steps in [("a", 0, 0, 10), ("a", 1, 0, 4), ("b", 0, 1, 10), ("b", 1, 1, 4)]
    ]
    (found,) = load("pretraining").trend(rows)
    assert found == {"model": "b", "first": "a", "parts": [0.5, 2.5, 4.5, 6.5, 8.5]}


def test_models_are_trained_and_compared(pretraining, tmp_path, capsys, monkeypatch):
    options = f"--set {SIZES}"
    rows = result_of(pretraining, options, tmp_path)
    assert rows.keys() == pretraining.MODELS.keys() and (tmp_path / "x.png").exists()
    assert all(len(row["training_losses"]) == 4 and len(row["documents"]) == 4 for row in rows.values())
    assert sum("keys_dropped" in row for row in rows.values()) == 2
    assert len({row["training_loss"] for row in rows.values()}) == len(rows)
    assert capsys.readouterr().out.count("| FoX (Pro) | loss at 129 to 256, nats |") == len(rows) - 1
    monkeypatch.setattr(pretraining, "torch", None)  # measured points are not computed again
    assert result_of(pretraining, options, tmp_path) == rows
