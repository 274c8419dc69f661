"""The committed demo models show what the demo claims."""

from demo_model import DEMO

from hf_longctx.metrics import read_result


CARDS = DEMO.parent


def test_the_demo_shows_what_the_gate_changes(load_script):
    """The input for a passage of n tokens has 2 n + 3 tokens.

    Within the training length, Transformer (Pro) copies as well as the FoX does. Beyond it, only the FoX copies.
    """
    names = load_script("train_demo").MODELS
    fox, transformer, _ = curves = [read_result(CARDS / name / "forgetting_curve.json") for name in names]
    assert {curve.settings["train_length"] for curve in curves} == {512}
    assert fox.interval("fine").low >= 192 <= transformer.interval("fine").low
    at_256, at_512 = (
        [next(point.copy_mean for point in curve.points if point.length == n) for curve in curves] for n in (256, 512)
    )
    assert min(at_256[:2]) > 0.98 > 0.5 > at_256[2]
    assert at_512[0] > 0.98 > 0.5 > max(at_512[1:])


def test_the_demo_compares_the_models_that_were_trained_for_it(load_script):
    assert {folder.name for folder in load_script("demo").MODELS.values()} == set(load_script("train_demo").MODELS)
