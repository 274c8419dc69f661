"""Pictures of the gates: which heads are shown, and that a file is written."""

import pytest
import torch

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from hf_longctx.fox.maps_fox import head_maps


plot_fox = pytest.importorskip("hf_longctx.fox.plot_fox", reason="pictures need matplotlib", exc_type=ImportError)
IDS = torch.arange(40)


def make(**kwargs):
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8)
    return FoxForCausalLM(FoxConfig(**sizes, **kwargs)).eval()


@pytest.mark.parametrize("choice", [{}, {"layers": [0], "resolution": 16}, {"layers": [1], "heads": [3]}], ids=str)
def test_writes_a_picture(choice, tmp_path):
    path = tmp_path / "gates.png"
    plot_fox.plot_forget_gates(make(), IDS, path, **choice)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_typical_heads_span_from_the_fastest_to_the_slowest():
    maps = head_maps(make(forget_gate="fixed", decay_time_min=2, decay_time_max=256), IDS)
    times = [x.decay_time for x in plot_fox.spread(maps, 4)]
    assert times == sorted(times) and len(times) == 4
    assert times[0] == pytest.approx(2, rel=1e-3) and times[-1] == pytest.approx(256, rel=1e-3)
    assert plot_fox.spread(maps[:1], 4) == maps[:1]


def test_headings():
    (x,) = head_maps(make(forget_gate="fixed", decay_time_min=1500, decay_time_max=1500), IDS, layers=[1], heads=[5])
    assert plot_fox.heading(x) == "layer 1, head 5\ndecay time 1,500 tokens"
    x.decay_time = float("inf")
    assert "forgets nothing" in plot_fox.heading(x)
