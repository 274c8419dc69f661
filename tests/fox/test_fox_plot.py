"""The maps of F and A, whole and reduced, agree with the definition, and their figures are written."""

import pytest
import tiny_fox
import torch
from tiny_fox import make

from hf_longctx.fox.plot import head_maps, plot_forget_gates, spread


VARIANTS = ["llama", "pro with grouped heads and rope", "one gate per key head", "window"]


def tokens(length):
    return tiny_fox.tokens(1, length)[0]


@torch.no_grad()
def by_definition(model, ids):
    """F and A of every layer, (layers, Hq, T, T)."""
    log_f = []
    hooks = [
        x.self_attn.f_proj.register_forward_hook(lambda m, i, out: log_f.append(out[0])) for x in model.model.layers
    ]
    model.set_attn_implementation("eager")
    attention = torch.cat(model(ids[None], output_attentions=True).attentions)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation("sdpa")
    c = torch.stack(log_f).double().cumsum(-1)
    c = c.repeat_interleave(attention.shape[1] // c.shape[1], dim=1)
    return (c[..., :, None] - c[..., None, :]).exp().float(), attention


@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_are_those_of_the_definition(variant):
    model, ids = make(variant), tokens(30)
    forget, attention = by_definition(model, ids)
    ago = torch.arange(30)[:, None] - torch.arange(30)
    visible = (ago >= 0) & (ago < (model.config.sliding_window or 30))
    maps = head_maps(model, ids)
    assert [(x.layer, x.head) for x in maps] == [(layer, head) for layer in range(2) for head in range(4)]
    for x in maps:
        want_forget, want_attention = (y[x.layer, x.head] for y in (forget, attention))
        assert torch.equal(x.forget.isnan(), ~visible) and torch.equal(x.attention.isnan(), ~visible)
        torch.testing.assert_close(x.forget[visible], want_forget[visible], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(x.attention[visible], want_attention[visible], atol=1e-5, rtol=1e-4)
        assert x.decay_time == pytest.approx(-29 / want_forget[-1, 0].log().item(), rel=1e-4)


def test_a_long_text_is_reduced_block_by_block(monkeypatch):
    monkeypatch.setattr("hf_longctx.fox.plot.CHUNK_ELEMENTS", 100)  # several pieces
    model, ids = make("llama"), tokens(50)
    (whole,) = head_maps(model, ids, layers=[1], heads=[2])
    (reduced,) = head_maps(model, ids[None], layers=[1], heads=[2], resolution=13)
    assert (whole.block, reduced.block, reduced.tokens) == (1, 4, 50)
    assert reduced.forget.shape == reduced.attention.shape == (13, 13)
    for i in range(13):
        for j in range(13):
            rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
            if j > i:
                assert reduced.forget[i, j].isnan() and reduced.attention[i, j].isnan()
            else:
                torch.testing.assert_close(reduced.forget[i, j], whole.forget[rows, columns].nanmean())
                torch.testing.assert_close(reduced.attention[i, j], whole.attention[rows, columns].nan_to_num(0).max())


@pytest.mark.parametrize("choice", [{}, {"layers": [0]}, {"layers": [1], "heads": [3]}], ids=str)
def test_writes_a_picture(choice, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    path = tmp_path / "gates.png"
    plot_forget_gates(make("llama"), tokens(40), path, **choice)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_typical_heads_span_from_the_fastest_to_the_slowest():
    maps = head_maps(make("fixed"), tokens(40))
    times = [x.decay_time for x in spread(maps, 4)]
    assert times == sorted(times) and len(times) == 4
    assert times[0] == pytest.approx(2, rel=1e-3) and times[-1] == pytest.approx(64, rel=1e-3)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"input_ids": torch.zeros(2, 5)}, "one sequence"),
        ({"layers": [2]}, r"layers must be .* 0 to 1, got \[2\]"),
        ({"model": torch.nn.Linear(1, 1)}, "a FoX with a forget gate, got a Linear"),
    ],
    ids=str,
)
def test_mistakes(options, says):
    with pytest.raises(ValueError, match=says):
        head_maps(**{"model": make("llama"), "input_ids": tokens(5)} | options)
