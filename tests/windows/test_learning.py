"""Learning of windows: the forward pass of a cache, the target share, the state, and the training sequences."""

import bisect
import itertools
import math

import pytest
import torch
from tiny_windows import make
from transformers import AttentionInterface, AutoTokenizer

from hf_longctx.metrics import LocalReader, forgetting_curve
from hf_longctx.metrics.run.caches import exact_block
from hf_longctx.windows import HeadWindows
from hf_longctx.windows.cache import WindowLayer
from hf_longctx.windows.learning import NAME, WindowLearner, WindowOptimizer, attention
from hf_longctx.windows.sequences import WindowSequences


LENGTH = 128
CORPUS = torch.randint(3, 300, (3000,), generator=torch.Generator().manual_seed(0)).numpy()


def learner(family="llama", keep=0.5, context=256, **options):
    return WindowLearner(make(family, torch.float32), LENGTH, keep=keep, keep_context=context, **options)


def batch(seed=0):
    ids = torch.randint(3, 300, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "granite", "olmo2", "gpt-oss"])
def test_training_reads_with_the_windows_that_are_applied_later(family):
    train = learner(family)
    train.choose(torch.randint(0, 4, train.chosen().shape, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        found = train.log_probs(batch()["input_ids"], torch.arange(LENGTH), train.weights)
    learned = train.windows()
    assert {16, -1} <= {window for row in learned.windows for window in row}
    model = train.release()
    assert not torch.allclose(model(batch()["input_ids"]).logits.log_softmax(-1), found, atol=1e-2)
    learned.apply(model)
    with torch.no_grad():
        expected = model(batch()["input_ids"]).logits.log_softmax(-1)
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("family", ["mistral", "phi3 with a sliding window"])
def test_layers_whose_config_has_the_sliding_window(family):
    """The attention layers of these models have no attribute `sliding_window`."""
    with pytest.raises(NotImplementedError, match="all of its layers have windows"):
        learner(family)
    model = make(family, torch.float32)
    model.config.sliding_window = 256  # is not shorter than the context
    train = WindowLearner(model, LENGTH, keep=0.5, keep_context=256)
    train.model.config.sliding_window = 24
    with pytest.raises(NotImplementedError, match="a sliding window of its own, got 24"):
        train(**batch())


def test_open_windows_cost_nothing():
    train = learner()
    train.choose(torch.full_like(train.chosen(), 3))
    assert train(**batch())["loss"] < 1e-6 and train.share(train.chosen()) == 1


def test_attention_that_another_package_wraps(monkeypatch):
    """kvpress wraps all attention functions, and passes dropout by position."""
    functions, train = AttentionInterface._global_mapping, learner()
    expected = train(**batch())["loss"]

    def wrapped(module, query, key, value, mask, dropout, *, attention=functions[NAME], **kwargs):
        return attention(module, query, key, value, mask, dropout, **kwargs)

    monkeypatch.setitem(functions, NAME, wrapped)
    assert train(**batch())["loss"] == expected


@pytest.mark.parametrize("keep", [0.2, 0.35, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_windows_compared_with_all_windows(keep, seed):
    train = learner(keep=keep, context=LENGTH)
    values = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(seed)).cumsum(-1)
    values[:, 2:] = 0  # 6 of 12 heads
    train.values.copy_(values)
    best = train.best(keep)

    def total(chosen):
        return values.gather(-1, chosen[..., None]).sum().item()

    def every():
        for sizes in itertools.product(range(4), repeat=6):
            chosen = torch.zeros_like(best)
            chosen[:, :2] = torch.tensor(sizes).view(3, 2)
            if train.share(chosen) <= keep:
                yield total(chosen)

    assert max(every()) - (values[..., -1] - values[..., 0]).max() <= total(best) <= max(every())
    train.choose(best)
    windows = train.windows()
    assert windows.share(LENGTH) == pytest.approx(train.share(best)) and train.share(best) <= keep
    assert all(window == -1 or window.bit_count() == 1 for row in windows.windows for window in row)
    for head in (best < 3).nonzero():
        larger = best.clone()
        larger[tuple(head)] += 1
        assert train.share(larger) > keep, "no window can grow"


@pytest.mark.parametrize("start", range(4))
def test_heads_that_the_model_needs_open_from_any_window(start):
    model = make("llama", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:  # the values of three of four key heads are zero
            layer.self_attn.v_proj.weight[layer.self_attn.head_dim :] = 0
    train = WindowLearner(model, LENGTH, keep=0.4, keep_context=LENGTH)
    train.choose(torch.full_like(train.chosen(), start))
    optimizer = WindowOptimizer(train.parameters(), train, steps=6, lr=0.3)
    shares = []
    for step in range(6):
        optimizer.zero_grad()
        train(**batch(step))["loss"].backward()
        optimizer.step()
        shares.append(train.share(train.chosen()))
    assert 0.4 < shares[0] <= 0.6 and max(shares[1:]) <= 0.4, "falls to its target in a third of the steps"
    assert (train.chosen()[:, :1] > train.chosen()[:, 1:]).all()


@pytest.mark.parametrize(("lr", "weights"), [(0.0, [1 / 4] * 4), (0.5, [1 / 8, 1 / 8, 1 / 4, 1 / 2])])
def test_the_values_are_averages_of_the_magnitudes_of_all_steps(lr, weights):
    train = learner()
    optimizer = WindowOptimizer(train.parameters(), train, steps=6, lr=lr)
    effects = torch.randn(4, *train.weights.shape, generator=torch.Generator().manual_seed(0))
    for scale, effect in enumerate(effects, 1):
        train.weights.grad = scale * effect.cumsum(-1)
        optimizer.step()
    effects[..., 0] = 0  # all heads keep the keys of the smallest window
    values = effects.abs().cumsum(-1) / effects.abs().sum((1, 2, 3), keepdim=True)
    expected = (torch.tensor(weights)[:, None, None, None] * values).sum(0)
    assert torch.allclose(train.values, expected, atol=1e-6)


def test_a_loss_without_a_gradient_does_not_change_the_order_of_the_values():
    train = learner()
    train.weights.grad = torch.zeros_like(train.weights)
    WindowOptimizer(train.parameters(), train, steps=6, lr=0.3).step()
    assert (train.values == 0).all()


def test_layers_with_sliding_windows_are_not_learned():
    train = learner("gemma3")
    assert train.weights.shape == (1, 4, 4)
    assert [set(row) for row in train.windows().windows] == [{-1}, {64}, {-1}]
    train.choose(torch.ones_like(train.chosen()))
    # 4 heads: two layers of 24 keys, and one of 256
    assert train.share(train.chosen()) == pytest.approx((2 * 24 + 32 + 4) / (2 * 24 + 256))


def test_the_state_contains_the_windows_only():
    train, other = learner(), learner()
    train.choose(torch.arange(12).view(3, 4) % 4)
    train.values.uniform_()
    assert sum(x.numel() for x in train.state_dict().values()) < 100
    other.load_state_dict(train.state_dict(), strict=False)
    assert other.windows() == train.windows() and torch.equal(other.values, train.values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 100}, r"`max_length` must be a power of two of at least 64, got 100\. Give --max_length 64\."),
        ({"max_length": 0}, r"`max_length` must be .* at least 64, got 0\. Give --max_length 64\."),
        ({"max_length": 1500}, r"got 1500\. Give --max_length 1024\."),
        ({"keep": 1.0}, r"`keep` must be above 0 and below 1, got 1\.0\. Give --keep"),
        (
            {"keep_context": 64},
            r"`keep_context` must be at least `max_length` \(128\), got 64\. Give a larger --keep_con",
        ),
        (
            {"keep": 0.05, "keep_context": 128},
            r"`keep` must be at least 0\.1563 .*, got 0\.05\..* Give a larger --keep",
        ),
    ],
)
def test_wrong_options_are_errors(options, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        WindowLearner(model, **{"max_length": LENGTH, "keep": 0.5, "keep_context": 256, **options})
    assert model.config._attn_implementation == "sdpa"


def test_a_learner_reads_sink_logits_as_the_model_does():
    train = learner("gpt-oss")
    with torch.no_grad():
        found = train.log_probs(batch()["input_ids"], torch.arange(LENGTH))
        expected = make("gpt-oss", torch.float32)(batch()["input_ids"]).logits.log_softmax(-1)
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"position_bias": torch.zeros(1)}, {"output_attentions": True}])
def test_options_of_attention_that_are_not_supported(option):
    layer = learner().layers[0]
    query, key = torch.randn(1, 8, 5, 4), torch.randn(1, 4, 5, 4)
    with pytest.raises(NotImplementedError, match="head windows do not"):
        attention(layer, query, key, key, None, **option)


def test_sequences_repeat_passages_and_records():
    tokenizer = AutoTokenizer.from_pretrained("model_cards/fox-demo")
    rows = torch.arange(5000, 85000).view(40, -1)  # no ids of the tokenizer
    sequences = WindowSequences([{"input_ids": row} for row in rows], tokenizer, size=8)
    for i in range(8):
        ids, labels = sequences[i]["input_ids"], sequences[i]["labels"]
        again = sequences[i]
        assert torch.equal(ids, again["input_ids"]) and torch.equal(labels, again["labels"])
        assert len(ids) == 2000 and ids[0] == tokenizer.bos_token_id and labels[0] == -100
        scored = labels != -100
        assert torch.equal(ids[scored], labels[scored]) and scored.sum() == 500
        end = ids[-350:]
        repeated = end[end >= 5000]
        for token in repeated:
            places = (ids == token).nonzero()
            assert places[-1] - places[0] >= 1000, "a window of half of the sequence would be enough"
        in_order = (repeated.diff() == 1).sum()
        assert 250 < len(repeated) < 334 and len(repeated) - in_order > 30, "a passage is shuffled"
        words = tokenizer.decode(ids).split()
        numbers = [word.strip("<>.") for word in words if word.strip("<>.").isdigit() and len(word.strip("<>.")) == 5]
        assert sum(numbers.count(number) == 2 for number in set(numbers)) == 4, "four records are repeated"
        pieces = [tokenizer.decode([token]) for token in ids]
        text, ends = "".join(pieces), list(itertools.accumulate(map(len, pieces)))
        for number in set(numbers):
            first, last = (bisect.bisect(ends, place) for place in (text.find(number), text.rfind(number)))
            assert first == last or last - first >= 1000, "a window of half of the sequence would be enough"
    assert not torch.equal(sequences[0]["input_ids"], sequences[1]["input_ids"])
    with pytest.raises(ValueError, match=r"must have at least \d+ tokens .*, got 150\. Give --max_length 512\."):
        WindowSequences([{"input_ids": row[:150]} for row in rows], tokenizer, size=8)


def test_learned_windows_are_saved_and_applied(tmp_path):
    train = learner()
    windows = train.windows()
    windows.save_pretrained(tmp_path)
    assert HeadWindows.from_pretrained(tmp_path) == windows


def test_metrics_read_windows_in_chunks():
    model = make("llama", torch.float32)
    windows = HeadWindows([[8] * 4] * 3)
    assert exact_block(windows.cache()) == math.inf
    counts = []
    for block in (math.inf, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WindowLayer, "exact_block", block)
            curve = forgetting_curve(
                LocalReader(model, windows), CORPUS, lengths=[9, 40], repeats=3, bos_token_id=1, eos_token_id=2
            )
            counts.append(curve.scores)
    assert counts[0] == counts[1]
