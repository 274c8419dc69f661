"""A run prints its progress on stderr."""

from types import SimpleNamespace

from hf_longctx.training import trainer
from hf_longctx.training.trainer import Progress


def test_a_line_every_ten_seconds_has_loss_speed_and_what_is_left(monkeypatch, capsys):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(trainer.time, "monotonic", lambda: clock.now)
    state = SimpleNamespace(global_step=0, max_steps=1000, is_world_process_zero=True)
    args, progress = SimpleNamespace(sequences_per_step=4, max_length=25), Progress()
    progress.on_train_begin(None, state, None)

    def take(count, seconds):
        for _ in range(count):
            clock.now += seconds
            state.global_step += 1
            progress.on_log(args, state, None, logs={"loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.5})
        return capsys.readouterr().err.splitlines()

    lines = take(20, 2)
    assert len(lines) == 4, "the first step, and one in more than ten seconds"
    assert lines[-1] == "step 19/1000  loss 2.5000  lr 1.00e-03  grad 0.50  50 tokens/s  32.7 min left"
    assert "  2 tokens/s" in take(1, 100)[-1]
    assert "  10 tokens/s" in take(3, 10.1)[-1], "the speed is that since the line before"
    assert take(976, 0.001)[-1].startswith("step 1000/1000"), "the last one is always printed"
    progress.on_log(args, state, None, logs={"eval_loss": 3.25})
    assert capsys.readouterr().err == "step 1000/1000  eval_loss 3.2500\n"
    state.is_world_process_zero = False
    progress.on_log(args, state, None, logs={"eval_loss": 3.25})
    assert not capsys.readouterr().err
