"""Plans: a repeated launch gives the bits of the first one, with the tensors of its own call."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from budget import DEVICE, draw, runs_triton

from hf_longctx.fox import launch_fox, triton_fox
from hf_longctx.fox.key_ranges_fox import find_visible_keys
from hf_longctx.fox.tiles_fox import Tile
from hf_longctx.fox.triton_fox import triton_attention


pytestmark = runs_triton


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(launch_fox, "PLANS", {})


@pytest.fixture
def launched(monkeypatch):
    """The launchers that were called, as opposed to repeated."""
    names, forward, backward = [], triton_fox.forward_pass, triton_fox.backward_pass
    monkeypatch.setattr(triton_fox, "forward_pass", lambda *args: (names.append("forward"), forward(*args))[1])
    monkeypatch.setattr(triton_fox, "backward_pass", lambda *args: (names.append("backward"), backward(*args))[1])
    return names


def run_in_place(inputs, **options):
    """Output and gradients of tensors that are not copied, so that their layout is as it is."""
    *leaves, do = (x.requires_grad_() for x in inputs)
    o = triton_attention(*leaves, **options)
    return o.detach(), *torch.autograd.grad(o, leaves, do.detach())


def unplanned(inputs, **options):
    launch_fox.PLANS.clear()
    return run_in_place(inputs, **options)


PRUNED = dict(log_pruning_tolerance=-3.0)


def test_a_repeated_call_has_its_own_tensors(launched):
    """The first result is not overwritten, and the second one is that of the second inputs."""
    visible = find_visible_keys(40, 40, torch.device(DEVICE), window=20)
    first, second = (draw(2, 2, 1, 40, 40, 16, seed=seed, openness=0.0) for seed in (0, 1))
    expected = [unplanned(inputs, **PRUNED, visible=visible) for inputs in (first, second)]
    launch_fox.PLANS.clear()
    launched.clear()
    got = [run_in_place(inputs, **PRUNED, visible=visible) for inputs in (first, second)]
    assert launched == ["forward", "backward"]
    assert not torch.equal(got[0][0], got[1][0])
    assert all(torch.equal(x, y) for g, e in zip(got, expected) for x, y in zip(g, e))


LAYOUTS = {
    "shape": lambda x: x[:, :, :-1],
    "strides": lambda x: x.mT.contiguous().mT if x.ndim == 3 else x.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda x: x if x.ndim == 3 else x.bfloat16(),
    "alignment": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_is_not_repeated(change, launched):
    inputs = draw(1, 2, 2, 33, 33, 16)
    run_in_place(inputs)
    others = [change(x.detach()) for x in inputs]
    got = run_in_place(others)
    assert launched == ["forward", "backward"] * 2
    assert all(map(torch.equal, got, unplanned(others)))


def test_arguments_that_share_memory_are_not_mixed_up(launched):
    """In the first call, keys and values are one tensor; in the second call, they are not."""
    q, k, v, log_f, _ = (x.detach() for x in draw(1, 1, 1, 20, 20, 16))
    triton_attention(q, k, k, log_f)
    got = triton_attention(q, k, v, log_f)
    launch_fox.PLANS.clear()
    assert torch.equal(got, triton_attention(q, k, v, log_f))
    assert launched == ["forward"] * 3


def test_a_launcher_that_computes_is_called_each_time():
    """Memory that a plan does not know, as a copy has, would be read after it was freed."""
    log_f, calls = draw(1, 1, 1, 20, 20, 16)[3].detach(), []

    def launcher(x):
        calls.append(x)
        return (triton_fox.launch_running_sum(x * 1, None),)

    for x in (log_f, 2 * log_f):
        (c,) = launch_fox.repeat(launcher, x)
        torch.testing.assert_close(c, x.double().cumsum(-1))
    assert len(calls) == 2


class Compiled:
    """A kernel as Triton compiles it. Triton 3.9 unloads it when it is deleted."""

    function = packed_metadata = None

    def __init__(self, launches):
        self.run = lambda *args: launches.append(args)


class Kernel:
    """A kernel whose cache of compiled kernels is empty after each launch."""

    arg_names = ["x"]

    def __init__(self):
        self.compiled, self.launches = weakref.WeakSet(), []

    def __getitem__(self, grid):
        self.compiled.add(compiled := Compiled(self.launches))
        return lambda *args, **options: compiled


def test_a_kernel_lives_as_long_as_its_plan(monkeypatch):
    kernel, x = Kernel(), torch.zeros(1)
    monkeypatch.setattr(launch_fox, "INTERPRETED", SimpleNamespace(value=True))  # there is no stream without a driver

    def launcher(x):
        launch_fox.launch(kernel, 1, Tile(1, 1, 1, 1), x)
        return x, x

    for _ in range(2):
        launch_fox.repeat(launcher, x)
    assert len(kernel.launches) == 1  # the second one
    assert len(kernel.compiled) == 1
    launch_fox.PLANS.clear()
    assert not kernel.compiled


def test_a_call_that_failed_is_not_repeated():
    def launcher(x):
        raise ValueError("as expected")

    for _ in range(2):
        with pytest.raises(ValueError, match="as expected"):
            launch_fox.repeat(launcher, torch.zeros(1))
        assert launch_fox.recording.plan is None


def test_old_plans_are_forgotten(monkeypatch):
    monkeypatch.setattr(launch_fox, "MAX_PLANS", 2)
    for T in (17, 18, 19):
        triton_attention(*(x.detach() for x in draw(1, 1, 1, T, T, 16)[:4]))
    assert len(launch_fox.PLANS) == 1
