"""Learning of windows: the forward pass of a cache, the target share, the state, and the training sequences."""

import bisect
import itertools
import math

import pytest
import torch
from tiny_windows import make
from transformers import AutoTokenizer

from hf_longctx.metrics import LocalReader, forgetting_curve
from hf_longctx.metrics.run.caches import exact_block
from hf_longctx.windows import HeadWindows
from hf_longctx.windows.cache import WindowLayer
from hf_longctx.windows.learning import WindowLearner, attention
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
    windows = torch.randint(4, 8, train.log2_windows.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        train.log2_windows.copy_(windows + 0.3)
        positions = torch.arange(LENGTH)
        found = train.log_probs(batch()["input_ids"], positions, train.weights())
    learned = train.windows(train.log2_windows)
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


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_open_windows_cost_nothing_and_the_price_closes_them(keep):
    train = learner(keep=keep)
    with torch.no_grad():
        train.log2_windows.fill_(train.open)
    output = train(**batch())
    assert output["divergence"] < 1e-6 and train.share(train.log2_windows) == 1
    output["loss"].backward()
    assert (train.log2_windows.grad > 0).all(), "the price makes windows smaller"
    price = train.price.item()
    train.end_step()
    assert train.price > 1.15 * price, "the share is above its target"


def test_a_price_far_from_its_target_reaches_its_limit():
    train = learner(keep=1e-4, context=10**6)
    with torch.no_grad():
        train.log2_windows.fill_(train.open)
    train.end_step()
    assert train.price == 5


def test_the_gradient_opens_a_window_that_hides_what_the_model_needs():
    train = learner(keep=0.3)
    with torch.no_grad():
        train.log2_windows.fill_(4.4)
        train.price.fill_(0.0)
    train(**batch())["loss"].backward()
    assert train.log2_windows.grad.sum() < 0


@pytest.mark.parametrize("size", [4.0, 5.0, 5.5, 6.0, 7.0])
def test_the_loss_and_the_price_have_the_gradient_of_the_same_keys(size):
    train = learner(context=LENGTH, sinks=0)
    with torch.no_grad():
        train.log2_windows.fill_(size)
    kept, paid = train.weights().sum(), LENGTH * train.interpolated_shares().sum()
    gradients = [torch.autograd.grad(count, train.log2_windows)[0] for count in (kept, paid)]
    assert torch.equal(*gradients) and (gradients[0] > 0).all()


@pytest.mark.parametrize("keep", [0.2, 0.35, 0.6])
def test_the_result_keeps_the_target_share(keep):
    train = learner(keep=keep, context=LENGTH)
    with torch.no_grad():
        train.average.uniform_(4, 7)
    result = train.result()
    windows = train.windows(result)
    assert keep - 0.2 < windows.share(LENGTH) <= keep
    assert windows.share(LENGTH) == pytest.approx(train.share(result))
    assert all(window == -1 or window.bit_count() == 1 for row in windows.windows for window in row)
    grown = result + torch.eye(result.numel()).view(-1, *result.shape)  # one window is larger in each
    assert all(train.share(x) > keep or x.max() > train.open for x in grown), "no window can grow"


def test_the_price_follows_windows_before_their_rounding_changes():
    train = learner(keep=0.6, context=LENGTH)
    with torch.no_grad():
        train.log2_windows.fill_(6.4)  # 64 of 128 tokens if rounded, a share of 0.53
        train.price.fill_(1.0)
    assert train.share(train.log2_windows) < 0.6
    train.end_step()
    assert train.price > 1


def test_learning_keeps_the_heads_that_the_model_needs():
    model = make("llama", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:  # the values of three of four key heads are zero
            layer.self_attn.v_proj.weight[layer.self_attn.head_dim :] = 0
    train = WindowLearner(model, LENGTH, keep=0.4, keep_context=LENGTH)
    optimizer = torch.optim.Adam([train.log2_windows], lr=0.3)
    for step in range(8):
        optimizer.zero_grad()
        train(**batch(step))["loss"].backward()
        optimizer.step()
        train.end_step()
    result = train.result()
    assert (result[:, :1] > result[:, 1:]).all()


def test_layers_with_sliding_windows_are_not_learned():
    train = learner("gemma3")
    assert train.log2_windows.shape == (1, 4)
    assert [set(row) for row in train.windows(train.result()).windows][::2] == [{-1}, {-1}]
    # 4 heads: two layers of 24 keys, and one of 256
    with torch.no_grad():
        train.log2_windows.fill_(5)
    assert train.share(train.log2_windows) == pytest.approx((2 * 24 + 32 + 4) / (2 * 24 + 256))


def test_the_state_contains_the_windows_only():
    train, other = learner(), learner()
    with torch.no_grad():
        train.log2_windows.fill_(5.25)
    train.end_step()
    assert sum(x.numel() for x in train.state_dict().values()) < 50
    other.load_state_dict(train.state_dict(), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(train.state_dict().values(), other.state_dict().values()))


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
    windows = train.windows(train.log2_windows)
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
