"""The committed demo models show what the demo claims."""

from demo_model import DEMO

from hf_longctx.metrics import read_result


CARDS = DEMO.parent


def test_the_fox_remembers_beyond_its_training_length(load_script):
    """The input for a passage of n tokens has 2 n + 3 tokens."""
    fox, llama = (read_result(CARDS / name / "forgetting_curve.json") for name in load_script("train_demo").MODELS)
    assert fox.settings["train_length"] == llama.settings["train_length"] == 512
    assert fox.interval("fine").low >= 192 and fox.interval("coarse").low >= 512
    accuracy = [{point.length: point.copy_mean for point in curve.points} for curve in (fox, llama)]
    assert accuracy[0][384] > 0.97 > 0.5 > accuracy[1][384]
