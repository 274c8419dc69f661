"""scripts/evidence/hmt_perplexity: what is trained on, what is scored, and what the memories are swapped for."""

import argparse
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from hf_longctx.hmt import HMTWrapper


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

T, L, K = 64, 16, 4  # tokens of a text, of a segment, and read again
SIZES = dict(segment_length=L, sensory_tokens=K, text_length=T, texts=4, rows=2, rows_at_once=2, text="novels")
SETTINGS = SIZES | dict(segments=2, first_steps=1, steps=2, learning_rate=1e-3, save_steps=1, backbone="smollm2")
RECALLING = ["HMT, single pass", "HMT, single pass, no recurrence", "HMT, three passes", "HMT, paper"]


@pytest.fixture
def module(load, smollm2):
    load("hmt_perplexity").tokens_of.cache_clear()
    return load("hmt_perplexity")


@pytest.fixture
def reading(load):
    return load("hmt_reading")


@pytest.fixture
def float32(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(**SETTINGS, device="cpu", work=tmp_path, name="x")


@pytest.fixture
def texts():
    return torch.randint(3, 400, (4, T + 1), generator=torch.Generator().manual_seed(0))


def untrained(module, name, args):
    torch.manual_seed(0)
    model = module.hmt_training.load_backbone(args)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 if weight.ndim == 1 else 5)  # so that logits differ
    return (module.hmt_training.wrap(model, name, args) if name in module.HMT else model).eval()


def parts_of(losses):
    """Return what a measurement keeps of the -log p of all predictions, (texts, T)."""
    segments = losses.view(len(losses), -1, L)
    later = segments[:, 1:]
    return torch.stack([segments[:, 0].mean(1), *(later[..., x].mean((1, 2)) for x in (slice(8), slice(8, L)))], 1)


# Reading.


@pytest.mark.parametrize(
    "window, size, step",
    [
        ("blocks", L, L),
        ("blocks and what the single-pass mode sees", L + K + 4, L),
        ("overlapping blocks", L, L // 2),
        ("whole context", T, T),
        ("whole context", T // 2, T // 4),  # of a context of T / 2
    ],
)
@torch.no_grad()
def test_each_token_is_predicted_from_the_tokens_of_its_window(
    window, size, step, module, reading, float32, args, texts
):
    model = untrained(module, "Llama", args)
    if window == "whole context":
        model.config.max_position_embeddings = size
    entry = reading.measure_reading(model, "Llama", window, texts, args)
    losses = torch.zeros(4, T)
    for text, place in np.ndindex(4, T):
        end = place // step * step + step  # of the window in which the prediction is made
        ids = texts[text, max(0, end - size) : place + 2]
        losses[text, place] = F.cross_entropy(model(ids[None, :-1]).logits[0, -1], ids[-1])
    by_segment = losses.view(4, -1, L)
    expected = {"texts": parts_of(losses), "by_segment": by_segment.mean((0, 2))}
    expected["by_position"] = by_segment[:, 1:].mean((0, 1))
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(entry[name]), values, atol=1e-4, rtol=0)
    assert entry["positions"] == sum(min(size, end) for end in range(step, T + 1, step)) / T


@pytest.mark.parametrize("name", [*RECALLING, "RMT"])
@torch.no_grad()
def test_a_memory_reads_each_text_from_its_start(name, module, reading, float32, args, texts):
    model = untrained(module, name, args)
    entry = reading.measure_reading(model, name, reading.SEGMENTS, texts, args)
    losses = F.cross_entropy(model(texts[:, :-1]).logits.mT, texts[:, 1:], reduction="none")
    torch.testing.assert_close(torch.tensor(entry["texts"]), parts_of(losses), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", RECALLING)
def test_swapped_memories_are_all_of_another_text(name, module, reading, float32, args, texts):
    model = untrained(module, name, args)

    def losses(which, texts, rows_at_once=2):
        args.rows_at_once = rows_at_once
        return torch.tensor(reading.measure_reading(model, name, which, texts, args)["texts"])

    plain, swapped = (losses(which, texts) for which in (reading.SEGMENTS, reading.SWAPPED))
    changed = plain.ne(swapped).all(0).tolist()
    assert changed == [False, "single pass" not in name, True]  # the single-pass mode recalls after a first half
    torch.testing.assert_close(losses(reading.SWAPPED, texts, 4), swapped, atol=1e-4, rtol=0)
    twins = texts[:1].expand(4, -1)
    torch.testing.assert_close(losses(reading.SWAPPED, twins), losses(reading.SEGMENTS, twins), atol=1e-4, rtol=0)
    # how a text begins is read in it, and in the text that takes its memories
    begun = texts.clone()
    begun[0, : L - K] = texts[1, : L - K]
    change = (losses(reading.SWAPPED, begun) - swapped).abs()
    assert change[0, 1:].max() <= 1e-4 < change[2, 2] and change[[1, 3]].max() == 0


# Training.


def inputs_of(method, module, args, monkeypatch):
    """The inputs of all calls of a training."""
    kind, calls = HMTWrapper if method in module.HMT else LlamaForCausalLM, []
    forward = kind.forward

    def recorded(self, input_ids, labels, **kwargs):
        assert torch.equal(input_ids, labels)
        calls.append(input_ids)
        return forward(self, input_ids=input_ids, labels=labels, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", recorded)
        _, losses = module.trained(method, 0, args)
    assert [len(x) for x in losses] == [args.first_steps, args.steps]
    return calls


def test_all_train_on_the_same_tokens(module, args, monkeypatch):
    args.rows, args.segments = 4, 3
    methods = "Llama", "Llama, long rows", "HMT, single pass", "RMT"
    calls = {method: inputs_of(method, module, args, monkeypatch) for method in methods}
    tokens = [torch.cat([x.flatten() for x in rows]) for rows in calls.values()]
    assert all(torch.equal(x, tokens[0]) for x in tokens)
    lengths = {method: [x.shape[1] for x in rows] for method, rows in calls.items()}
    assert lengths.pop("Llama") == 6 * [L]  # in two calls for each of three steps
    assert all(x == [2 * L] * 2 + [3 * L] * 4 for x in lengths.values())
    assert {x.shape[0] for x in calls["Llama"]} == {4, 6}


@pytest.mark.parametrize("method", [*RECALLING, "RMT"])
def test_the_second_stage_recalls_and_starts_from_the_first(method, module, args):
    torch.manual_seed(0)
    first = module.hmt_training.wrap(module.hmt_training.load_backbone(args), method, args, recall=False)
    with torch.no_grad():
        for parameter in first.memory.parameters():
            parameter.add_(1)
    if method == "RMT":
        assert not module.recalls(method) and module.hmt_training.second_stage(first, method, args) is first
        return
    second = module.hmt_training.second_stage(first, method, args)
    trained = dict(first.memory.named_parameters())
    assert second.config.recall and all(torch.equal(second.memory.get_parameter(n), p) for n, p in trained.items())
    assert torch.equal(second.memory.summary_token, trained.get("summary_token", trained.get("initial")))
    model, _ = module.trained(method, 0, args)
    assert model.config.recall and not torch.equal(model.memory.wq, torch.eye(*model.memory.wq.shape))


@pytest.mark.parametrize("step", [0, 1, 2])  # in the first stage, and in the second
def test_an_interrupted_training_ends_as_one_that_was_not(step, module, tmp_path, monkeypatch):
    steps, clip = iter(range(100)), torch.nn.utils.clip_grad_norm_

    def rows_of(folder, **changes):
        options = SETTINGS | {"seeds": 0, "methods": "HMT, single pass"} | changes
        options |= {name: f"{tmp_path}/{folder}/{name}" for name in ("work", "output")}
        options |= {"picture": f"{tmp_path}/{folder}/x.png"}
        module.main([x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))])
        return json.loads((tmp_path / folder / "output").read_text())["rows"]

    def interrupted(*arguments):
        if next(steps) == step:
            raise KeyboardInterrupt
        return clip(*arguments)

    whole = rows_of("whole")
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows_of("interrupted")
    if step:
        (journal,) = (tmp_path / "interrupted" / "work").glob("*.jsonl")
        journal.rename(tmp_path / "journal")
        with pytest.raises(
            ValueError, match=r"_1.pt is of a training with other options \(learning_rate\). Remove it"
        ):
            rows_of("interrupted", learning_rate=1e-4)
        (tmp_path / "journal").rename(journal)
    assert rows_of("interrupted") == whole and not list(tmp_path.rglob("*.pt"))
    assert next(steps) == 4  # each of three steps once, and the one interrupted


# Showing.


def row(model, seed, change, readings):
    entry = {"positions": 1.0, "by_segment": [2.0, 2.0], "by_position": [2.0] * 16}
    texts = [[2.0, 2.0 + change, 2.0 + change], [3.0, 3.0 + change, 3.0 + change]]
    return {"model": model, "seed": seed, "losses": [], "readings": {x: entry | {"texts": texts} for x in readings}}


def test_changes_are_taken_text_by_text_and_seed_by_seed(module):
    """Texts differ more from each other than models do."""
    several = module.series(
        [
            row("HMT, single pass", 0, np.log(1.1), ["segments"]),
            row("HMT, single pass", 1, np.log(9.9), ["segments"]),
            row("Llama", 0, 0.0, ["overlapping blocks"]),
            row("RMT", 7, 0.0, ["segments"]),
        ]
    )
    reference = several[module.REFERENCE]
    assert module.change(several["HMT, single pass"], reference) == "+10.0 % (+10.0 to +10.0)"
    assert module.change(several["RMT"], reference) is None and module.change(reference, reference) is None


def test_a_table_compares_what_is_there(module):
    memory = [row("HMT, single pass", 0, -0.1, ["segments"]), row("HMT, single pass", 1, -0.3, ["segments"])]
    alone = module.table({"settings": SETTINGS, "rows": memory})
    assert "to overlapping blocks" not in alone and "2 texts of 64 tokens, pieces of one novel" in alone
    others = [row("Llama", seed, 0.0, ["overlapping blocks"]) for seed in (0, 1)]
    others += [row("HMT, single pass", seed, 0.0, [module.SWAPPED]) for seed in (0, 1)]
    others += [row("HMT, paper", 0, -0.5, ["segments"])]
    table = module.table({"settings": SETTINGS, "rows": [*memory, *others]})
    lines = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in table.splitlines())}
    assert "-18.1 % (-18.1 to -18.1)" in lines["HMT, single pass"]  # the mean of both seeds, exp(-0.2)
    assert "+22.1 % (+22.1 to +22.1)" in lines[f"HMT, single pass: {module.SWAPPED}"]
    assert lines["HMT, paper"] == ["1.00"]  # neither perplexity nor changes: it has read first halves


@pytest.mark.parametrize(
    "options, message",
    [
        ("--methods HMT", "--methods has .'HMT'.: choose from 'Llama', 'Llama, long rows', 'HMT, single pass'"),
        ("--rows-at-once 0", "--rows-at-once must be at least 1, and is 0"),
        ("--segment-length 40", "--segment-length must be a multiple of 16, and is 40"),
        ("--text-length 1000", "--text-length must be 2 to 300 times --segment-length, 512, and is 1000"),
        ("--segments 8", "Rows of 8 segments have 4096 tokens, and the context of smollm2 is 2048"),
        ("--segments 4", "held-out part of novels has 0 texts of --text-length 16384 tokens, and it takes two"),
        ("--segments 4 --text-length 1024", "train part of novels has .* tokens, and a row of 4 segments 2048"),
    ],
)
def test_options_that_cannot_work_are_refused_before_training(options, message, module, tmp_path):
    arguments = [*options.split(), "--work", f"{tmp_path}/work", "--output", f"{tmp_path}/x.json"]
    with pytest.raises(ValueError, match=message):
        module.main(arguments)
    assert not list(tmp_path.rglob("*.pt"))
