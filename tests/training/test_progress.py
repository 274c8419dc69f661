"""A run says on stderr how far it is: on a terminal in one line that is written again, in a log line by line."""

import io
import re
from types import SimpleNamespace

import pytest

from hf_longctx.training import progress
from hf_longctx.training.progress import CLEAR, Passing, Progress, print_status


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def steps(clock):
    """Lets a `Progress` of steps of 100 tokens see steps of some seconds."""
    state = SimpleNamespace(global_step=0, max_steps=1000, epoch=0.0)

    def begin(**options):
        told = Progress(100, **{"has_epochs": True} | options)
        told.on_train_begin(None, state, None)

        def take(count, seconds):
            for _ in range(count):
                clock.now += seconds
                state.global_step += 1
                state.epoch = state.global_step / 40
                logs = {"loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.5}
                told.on_log(None, state, None, logs=logs)

        return told, state, take

    return begin


def test_a_line_every_ten_seconds_has_epoch_loss_speed_and_what_is_left(steps, capsys):
    _, _, take = steps()
    take(20, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4, "the first step, and one in ten seconds"
    line = "step 16/1000  epoch 0.40  loss 2.5000  lr 1.00e-03  grad 0.50  50 tokens/s  32.8 min left"
    assert lines[-1] == line
    take(980, 0.001)
    assert "step 1000/1000" in capsys.readouterr().err, "the last one is always told"


def test_the_speed_is_that_of_the_last_minute(steps, capsys):
    _, _, take = steps()
    take(1, 3000)  # a stall
    take(10, 10)
    assert "  10 tokens/s" in capsys.readouterr().err.splitlines()[-1]


def test_evaluations_and_measurements_are_told_and_left_out_of_the_speed(steps, clock, capsys):
    told, state, take = steps()
    take(5, 10)
    for _ in range(40):
        clock.now += 5
        told.on_prediction_step(None, state, None, eval_dataloader=range(40))
    told.on_log(None, state, None, logs={"eval_loss": 3.25})
    clock.now += 500
    told.leave_out(500)
    take(1, 10)
    said = capsys.readouterr().err.splitlines()
    assert said[-2] == "step 5/1000  eval_loss 3.2500" and "  10 tokens/s" in said[-1]
    passes = [line for line in said if "evaluating" in line]
    assert passes[0] == "step 5  evaluating: 1 of 40 passes" and len(passes) == 20
    told.on_prediction_step(None, state, None, eval_dataloader=range(40))
    assert told.passes == 1


def test_a_stream_has_no_epochs(steps, capsys):
    steps(has_epochs=False)[2](1, 10)
    assert "epoch" not in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_what_passes_is_written_over_on_a_terminal(is_terminal, clock, monkeypatch):
    written = Terminal(is_terminal)
    monkeypatch.setattr(progress.sys, "stderr", written)
    passing = Passing()
    for number in range(21):
        passing.tell(f"packing: {number}")
        clock.now += 1
    print_status("packed")
    if is_terminal:
        assert re.split(re.escape(CLEAR), written.getvalue())[1:] == [
            *(f"packing: {n}" for n in range(1, 21)),
            "packed\n",
        ]
    else:
        assert written.getvalue() == "packing: 10\npacking: 20\npacked\n"
