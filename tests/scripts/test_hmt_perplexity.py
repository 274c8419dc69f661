"""scripts/evidence/hmt_perplexity: what is scored, by what it is read, and what the memories are changed for."""

import argparse
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F


T, L = 64, 16  # tokens of a text and of a segment
SIZES = dict(segment_length=L, sensory_tokens=4, text_length=T, texts=4, rows=2, rows_at_once=2, text="novels")
SETTINGS = SIZES | dict(segments=2, first_steps=1, steps=2, learning_rate=1e-3, save_steps=1, backbone="smollm2")


@pytest.fixture
def module(load, smollm2, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # all in float32
    return load("hmt_perplexity")


@pytest.fixture
def args():
    return argparse.Namespace(**SETTINGS, device="cpu")


@pytest.fixture
def texts():
    return torch.randint(3, 400, (4, T + 1), generator=torch.Generator().manual_seed(0))


def untrained(module, name, args):
    torch.manual_seed(0)
    model = module.load_backbone(args)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 if weight.ndim == 1 else 5)  # so that logits differ
    return (module.wrap(model, name, args) if name in module.HMT else model).eval()


def losses_at(model, ids, first):
    """-log p of the tokens after position `first`, each beside the number of its prediction's position."""
    logits = model(ids[None, :-1]).logits[0].float()
    return F.cross_entropy(logits[first:], ids[first + 1 :], reduction="none")


def parts_of(losses):
    """What a measurement keeps of the -log p of all predictions, (texts, T)."""
    segments = losses.view(len(losses), -1, L)
    later = segments[:, 1:]
    return torch.stack([segments[:, 0].mean(1), *(later[..., x].mean((1, 2)) for x in (slice(8), slice(8, L)))], 1)


@pytest.mark.parametrize(
    "reading, size, step",
    [
        ("blocks", L, L),
        ("blocks and what the single mode sees", L + 4 + 4, L),
        ("overlapping blocks", L, L // 2),
        ("whole context", T, T),
        ("whole context", T // 2, T // 4),  # of a context of T / 2
    ],
)
@torch.no_grad()
def test_each_token_is_predicted_from_the_tokens_of_its_window(reading, size, step, module, args, texts):
    model = untrained(module, "Llama", args)
    if reading == "whole context":
        model.config.max_position_embeddings = size
    entry = module.measure_reading(model, "Llama", reading, texts, args)
    losses = torch.zeros(4, T)
    for text, place in np.ndindex(4, T):
        end = place // step * step + step  # of the window in which the prediction is made
        window = texts[text, max(0, end - size) : end + 1]
        losses[text, place] = losses_at(model, window, len(window) - 2 - (end - 1 - place))[0]
    torch.testing.assert_close(torch.tensor(entry["texts"]), parts_of(losses), atol=1e-4, rtol=0)
    by_segment, of_bins = losses.view(4, -1, L).mean((0, 2)), losses.view(4, -1, L)[:, 1:].mean((0, 1))
    torch.testing.assert_close(torch.tensor(entry["by_segment"]), by_segment, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(entry["by_position"]), of_bins, atol=1e-4, rtol=0)
    read = sum(min(size, end) for end in range(step, T + 1, step))
    assert entry["positions"] == read / T


@pytest.mark.parametrize("name", ["HMT, single", "HMT, single, no recurrence", "HMT, causal", "HMT, paper", "RMT"])
@torch.no_grad()
def test_a_memory_reads_each_text_from_its_start(name, module, args, texts):
    model = untrained(module, name, args)
    entry = module.measure_reading(model, name, module.OWN, texts, args)
    logits = model(texts[:, :-1]).logits
    losses = F.cross_entropy(logits.mT, texts[:, 1:], reduction="none")
    torch.testing.assert_close(torch.tensor(entry["texts"]), parts_of(losses), atol=1e-4, rtol=0)


def test_the_single_mode_reads_the_positions_that_its_windows_have(module, args, texts):
    model = untrained(module, "HMT, single", args)
    entry = module.measure_reading(model, "HMT, single", module.OWN, texts, args)
    in_first_segment = model.config.positions_per_segment - args.sensory_tokens - 1  # nor a recalled prompt
    later = (T // L - 1) * model.config.positions_per_segment
    assert T * entry["positions"] == pytest.approx(in_first_segment + later, abs=T // L)


@pytest.mark.parametrize("name", ["HMT, single", "HMT, single, no recurrence", "HMT, causal", "HMT, paper"])
def test_the_memories_of_another_text_change_what_follows_a_recall(name, module, args, texts):
    model = untrained(module, name, args)
    own, other = (module.measure_reading(model, name, x, texts, args)["texts"] for x in (module.OWN, module.OTHER))
    changed = torch.tensor(own).ne(torch.tensor(other)).all(0).tolist()
    assert changed == [False, "single" not in name, True]  # the single mode recalls after a first half
    twins = texts[:1].expand(4, -1)
    own, other = (module.measure_reading(model, name, x, twins, args) for x in (module.OWN, module.OTHER))
    assert own == other


def test_all_train_on_the_same_tokens(module, args, monkeypatch, tmp_path):
    args.work, args.name, seen = tmp_path, "x", {}
    args.rows, args.segments = 4, 3
    for method in ("Llama", "Llama, long rows", "HMT, single", "RMT"):
        rows = seen[method] = []
        model = untrained(module, method, args)
        forward = model.forward

        def recorded(input_ids, labels, forward=forward, rows=rows, **kwargs):
            assert torch.equal(input_ids, labels)
            rows.append(input_ids.flatten())
            return forward(input_ids=input_ids, labels=labels, **kwargs)

        model.forward = recorded
        with monkeypatch.context() as patch:
            patch.setattr(module, "load_backbone", lambda args, model=model: model)
            patch.setattr(module, "wrap", lambda model, *args, **kwargs: model)
            patch.setattr(module, "with_recall", lambda model, *args: model)
            tokenizer = module.AutoTokenizer.from_pretrained(module.BACKBONES["smollm2"])
            _, losses = module.trained(method, 0, tokenizer, args)
        assert [len(x) for x in losses] == [args.first_steps, args.steps]
        for file in module.checkpoints(method, 0, args):
            file.unlink()
    tokens = [torch.cat(rows) for rows in seen.values()]
    assert all(torch.equal(x, tokens[0]) for x in tokens)
    assert len(tokens[0]) == 4 * L * (2 * args.first_steps + 3 * args.steps)


@pytest.mark.parametrize("step", [0, 1, 2])  # in the first stage, and in the second
def test_an_interrupted_training_ends_as_one_that_was_not(step, load, smollm2, tmp_path, monkeypatch):
    module, steps, clip = load("hmt_perplexity"), iter(range(100)), torch.nn.utils.clip_grad_norm_

    def rows_of(folder):
        options = {name: value for name, value in SETTINGS.items() if name != "texts"} | {"seeds": 0, "texts": 2}
        options |= {name: f"{tmp_path}/{folder}/{name}" for name in ("work", "output")}
        options |= {"picture": f"{tmp_path}/{folder}/x.png", "methods": "HMT, single"}
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
    assert rows_of("interrupted") == whole and not list(tmp_path.rglob("*.pt"))
    assert next(steps) == 4  # each of three steps once, and the one interrupted


def test_texts_are_taken_from_each_document_before_a_second_of_any(module, args, monkeypatch):
    """With --text pg19, whose parts are splits of a dataset."""
    books = {
        "train": ["a " * 50, "b " * 500, "c " * 9000, "never read"],
        "held_out": ["d " * 200, "e " * 5, "f " * 90],
    }
    read = []

    def open_source(source, part):
        assert source == "pg19"
        return source, (read.append(x[0]) or x for x in books[part])

    monkeypatch.setattr(module, "open_source", open_source)
    tokenizer = module.AutoTokenizer.from_pretrained(module.BACKBONES["smollm2"])
    args.text, args.texts, args.text_length = "pg19", 3, 16
    long = [
        torch.tensor(tokenizer(x, add_special_tokens=False)["input_ids"]) for x in books["held_out"] if x[0] != "e"
    ]
    texts = module.held_out_texts(tokenizer, args)
    assert texts.tolist() == [x[:17].tolist() for x in long]  # two at once, so that the third is left out
    args.texts = 4
    texts = module.held_out_texts(tokenizer, args)
    assert texts[2:].tolist() == [x[16:33].tolist() for x in long]
    read.clear()
    args.rows, args.first_steps, args.steps = 10, 1, 1
    assert len(module.training_tokens(tokenizer, args)) >= 10 * L * 4
    assert "n" not in read


def test_changes_are_taken_text_by_text(module):
    """Texts differ more from each other than models do."""
    losses = np.array([1.0, 5.0, 3.0, 8.0])
    assert module.change(losses + np.log(1.1), losses) == "+10.0 % (+10.0 to +10.0)"
    mean, low, high = module.interval(losses)
    assert mean == 4.25 and 1 < low < 3 and 5.5 < high < 8
    assert module.interval(np.array([1.0, 2.0, 4.0] * 30))[2] - 7 / 3 < 0.3  # more texts, a narrower interval


def test_a_table_compares_what_is_there(module):
    def row(model, seed, change, readings):
        entry = {"positions": 1.0, "by_segment": [2.0, 2.0], "by_position": [2.0] * 16}
        texts = [[2.0, 2.0 + change, 2.0 + change], [3.0, 3.0 + change, 3.0 + change]]
        return {
            "model": model,
            "seed": seed,
            "losses": [],
            "readings": {x: entry | {"texts": texts} for x in readings},
        }

    settings = SETTINGS | {"rows": 2}
    memory = [row("HMT, single", 0, -0.1, ["segments"]), row("HMT, single", 1, -0.3, ["segments"])]
    alone = module.table({"settings": settings, "rows": memory})
    assert "to overlapping blocks" not in alone and "2 texts of 64 tokens (novels)" in alone
    reference = row("Llama", 0, 0.0, ["overlapping blocks"])
    control = row("HMT, single", 0, 0.0, [module.OTHER])
    table = module.table({"settings": settings, "rows": [*memory, reference, control]})
    lines = {line.split(" | ")[0]: line for line in table.splitlines()}
    assert "-18.1 % (-18.1 to -18.1)" in lines["| HMT, single"]  # the mean of both seeds, exp(-0.2)
    assert "9.97 to 12.18" not in lines["| HMT, single"] and "9.03 to 11.02" in lines["| HMT, single"]
    assert "+22.1 % (+22.1 to +22.1)" in lines[f"| HMT, single: {module.OTHER}"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--methods HMT", "--methods has .'HMT'.: choose from 'Llama', 'Llama, long rows', 'HMT, single'"),
        ("--rows-at-once 1", "--rows-at-once must be at least 2, and is 1"),
        ("--segments 1", "--segments must be at least 2, and is 1"),
        ("--first-steps 0", "--first-steps must be at least 1, and is 0"),
        ("--segment-length 40", "--segment-length must be a multiple of 16, and is 40"),
        ("--text-length 1000", "--text-length must be two or more times --segment-length, 512, and is 1000"),
        ("--text-length 512", "--text-length must be two or more times --segment-length, 512, and is 512"),
        ("--segments 8", "Rows of 8 segments have 4096 tokens, and the context of smollm2 is 2048"),
        ("--segments 4", "held-out part of novels has . texts of --text-length 16384 tokens, and --rows-at-once is 2"),
        ("--segments 4 --text-length 1024 --rows-at-once 99", "--rows-at-once is 99"),
        (
            "--segments 4 --steps 9999 --text-length 1024",
            "train part of novels has .* tokens, and a row of 4 segments",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_before_training(options, message, load, smollm2, tmp_path):
    module = load("hmt_perplexity")
    arguments = [*options.split(), "--work", f"{tmp_path}/work", "--output", f"{tmp_path}/x.json"]
    with pytest.raises(ValueError, match=message):
        module.main(arguments)
    assert not list(tmp_path.rglob("*.pt"))
