"""scripts/evidence/hmt_perplexity: what is trained on, what is scored, and what the memories are swapped for."""

import argparse
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

T, L, K = 64, 16, 4  # tokens of a text, of a segment, and read again
SIZES = dict(segment_length=L, sensory_tokens=K, text_length=T, texts=4, rows=2, rows_at_once=2, text="novels")
SETTINGS = SIZES | dict(
    segments=2, first_steps=1, steps=2, learning_rate=1e-3, save_steps=1, backbone="smollm2", until=math.inf
)


@pytest.fixture
def module(load, smollm2):
    load("hmt_perplexity").novels.cache_clear()
    return load("hmt_perplexity")


@pytest.fixture
def reading(load):
    return load("hmt_reading")


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
        ("blocks and what the single-pass mode sees", L + K + 4, L),
        ("overlapping blocks", L, L // 2),
        ("whole context", T // 2, T // 4),  # of a context of T / 2
    ],
)
@torch.no_grad()
def test_each_token_is_predicted_from_the_tokens_of_its_window(window, size, step, module, reading, args, texts):
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


def test_swapped_memories_are_those_of_another_text(module, reading, args, texts):
    model = untrained(module, "HMT, paper", args)

    def losses(which, texts):
        return torch.tensor(reading.measure_reading(model, "HMT, paper", which, texts, args)["texts"])

    plain, swapped = (losses(which, texts) for which in (reading.SEGMENTS, reading.SWAPPED))
    assert plain.ne(swapped).all(0).tolist() == [False, True, True]
    twins = texts[:1].expand(4, -1)
    torch.testing.assert_close(losses(reading.SWAPPED, twins), losses(reading.SEGMENTS, twins), atol=1e-4, rtol=0)


# Training.


def test_a_training_that_ran_out_of_time_resumes(module, load, args):
    args.first_steps, args.save_steps, args.until = 2, 9, -math.inf
    for _ in range(2):  # each runs for a step
        with pytest.raises(load("parts").OutOfTime):
            module.trained("HMT, single pass", 0, args)
    stopped = module.trained("HMT, single pass", 0, args)
    args.until, args.work = math.inf, args.work / "other"
    args.work.mkdir()
    at_once = module.trained("HMT, single pass", 0, args)
    assert stopped[1] == at_once[1]
    for name, weight in at_once[0].state_dict().items():
        assert not isinstance(weight, torch.Tensor) or torch.equal(weight, stopped[0].state_dict()[name]), name
