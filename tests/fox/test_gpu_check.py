"""hf-longctx gpu-check: wrong implementations are named and never ranked.

A CPU stands for the GPU, and Triton's interpreter for its kernels; times are made up.
"""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_selection_fox import pretend

from hf_longctx import cli
from hf_longctx.cli import gpu_check as command
from hf_longctx.fox import FoxConfig, forgetting_attention_ref, gpu_check, peers, selection_fox
from hf_longctx.fox.budget_fox import draw
from hf_longctx.fox.selection_fox import make_case


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
MACHINE = {"section": "machine", "name": "G", "matmul_tflops": 100.0, "copy_tb_per_s": 2.0}


def test_a_wrong_implementation_is_named_and_never_ranked(monkeypatch, tmp_path, capsys):
    names = pretend(monkeypatch, tmp_path, itertools.count(1))
    clock = itertools.count(1)

    def seconds(function):
        function()
        return next(clock)

    monkeypatch.setattr(gpu_check, "seconds", seconds)
    assert cli.main(["gpu-check", "--device", "cpu", "--minutes", "9", "--output", str(tmp_path / "new" / "x")]) == 1
    printed, failed = capsys.readouterr()
    assert "wrong_gradient (training, float32, heads of 16): dq is" in failed and "Please attach" in failed
    assert "| without_gate | WRONG: o is" in printed and "| no_kernel | cannot run: RuntimeError: no kernel" in printed
    assert [printed.count(f'"auto" takes {name}.') for name in (names[3], "wrong_gradient")] == [1, 2]  # without dq
    rows = json.loads((tmp_path / "new" / "x.json").read_text())
    by_work = {
        work: {row["name"]: row for row in rows if row.get("work") == work}
        for work in ("training", "prefill", "decoding")
    }
    for work, found in by_work.items():
        assert {"without_gate", "no_kernel", *names[3:]} <= found.keys()
        ranked = {name for name, row in found.items() if "ms" in row and "peer" not in row}
        assert ranked - {"forgetting_triton, all keys"} == {*names[3:], *(["wrong_gradient"] * (work != "training"))}
    assert by_work["training"]["SDPA flash (no gate)"]["tflops"] > 0
    steps = [row for row in rows if row["section"] == "step"]
    assert [row["name"] for row in steps] == ["Llama, sdpa", "FoX (Pro), sdpa", "FoX (Pro), auto"]
    assert all(row["tokens_per_s"] > 0 for row in steps)
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_current_gpu_is_that_of_the_option(monkeypatch, tmp_path):
    """torch.cuda.set_device takes no device without a number."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(gpu_check, "check_gpu", lambda device, minutes: [MACHINE])
    monkeypatch.setattr(gpu_check, "plot", lambda rows, path: None)
    for device in ("cuda", "cuda:1"):
        assert not cli.main(["gpu-check", "--device", device, "--output", str(tmp_path / "x.json")])
    assert chosen == [0, 1]


def test_rates_count_the_products_of_causal_attention():
    config = FoxConfig.pro(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    found = {}
    for work in ("training", "prefill", "decoding"):
        case = make_case(config, torch.bfloat16, work)._replace(length=1000)
        found[work] = gpu_check.rates(case, config, milliseconds=2.0)
    products = 2 * 4 * 16 * (1000**2 / 2)  # two of D for each of T^2 / 2 logits of a head, 2 operations each
    assert found["prefill"]["tflops"] == pytest.approx(2 * products / 2e-3 / 1e12)
    assert found["training"]["tflops"] == pytest.approx(3.5 * 2 * products / 2e-3 / 1e12)
    assert found["decoding"]["tb_per_s"] == pytest.approx(2 * 2 * 1000 * 16 * 2 / 2e-3 / 1e12)


@pytest.mark.parametrize("D, widths", [(64, (72, 72, 72)), (128, (136, 136, 128))])
def test_flash_attention_3_reads_values_of_their_own_width_where_it_has_a_kernel(D, widths, monkeypatch):
    def flash(q, k, v, causal, softmax_scale):
        assert tuple(x.shape[-1] for x in (q, k, v)) == widths
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*inputs, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "some_flash", SimpleNamespace(flash_attn_func=flash))
    inputs = draw(1, 2, 2, 20, 20, D)[:4]
    got = peers.folded_flash("some_flash", 8)(*inputs)
    torch.testing.assert_close(got, forgetting_attention_ref(*inputs), atol=1e-4, rtol=0)


def test_a_machine_without_a_gpu_and_other_mistakes(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    for options, expected in [([], "no CUDA GPU"), (["--device", "mps"], "cuda:1"), (["--full"], "needs a checkout")]:
        assert cli.main(["gpu-check", *options]) == 2
        assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_full_runs_tests_and_benchmark_and_tells_which_failed(monkeypatch, tmp_path, capsys):
    row = {"section": "attention", "work": "prefill", "dtype": "bfloat16", "head_dim": 64, "length": 9, "name": "sdpa"}
    row |= {"errors": {"o": (0.1, 0.4)}, "mistake": None, "ms": 1.0, "tflops": 50.0}
    monkeypatch.setattr(gpu_check, "check_gpu", lambda *args: [MACHINE, row])
    monkeypatch.setattr(command, "FULL", {"tests": "no_such_module", "benchmark": "calendar 2026"})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = tmp_path / "x.json"
    assert cli.main(["gpu-check", "--device", "cpu", "--full", "--output", str(output)]) == 1
    printed, failed = capsys.readouterr()
    assert "| sdpa | right (25% of the budget) | 1 | 50 TFLOP/s | 50% |" in printed
    assert "the tests ended with 1" in failed and "benchmark" not in failed and "no picture" in failed
    assert [row["exit_code"] for row in json.loads(output.read_text())[2:]] == [1, 0]


def test_each_panel_of_the_picture_has_bars(monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, path: drawn.extend(self.axes))
    row = {"section": "attention", "dtype": "bfloat16", "head_dim": 64, "name": "a", "ms": 1.0, "tflops": 50.0}
    gpu_check.plot([MACHINE, *(row | {"work": "training", "length": length} for length in range(4))], "x.png")
    assert [len(axes.patches) for axes in drawn if axes.get_visible()] == [1] * 4


def test_what_has_no_time_left_is_said(monkeypatch):
    monkeypatch.setattr(gpu_check, "seconds", lambda function: 1.0)
    rows = list(gpu_check.check_gpu(torch.device("cpu"), minutes=0))
    assert [row["section"] for row in rows] == ["machine", "late"]
    assert "No time was left for: training, heads of 16" in gpu_check.report(rows)
    assert selection_fox.describe(torch.device("cpu")) in gpu_check.report(rows)
