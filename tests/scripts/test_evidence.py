"""scripts/evidence at tiny sizes: what is measured is kept, and the committed figures show what the text says."""

import json
from types import SimpleNamespace

import pytest
import torch
from commands import run


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

TINY = {
    "extrapolation": "--train-length 16 --read-length 32 --steps 2 --seeds 0 1",
    "rope_base": "--first-steps 1 --steps 1 --rows 2 --length 128 --bases 100 10000 --seeds 0",
    "rope_smollm2": "--lines 2 --needles 256 --repeats 1 --haystacks 1",
    "llama_to_fox": "--length 32 --steps 2 --contexts 1024 --curve-lengths 8 --repeats 1 --held-out-rows 2",
    "hmt_facts": "--segment-length 64 --sensory-tokens 4 --first-steps 1 --steps 2 --rows 2 --asked 2 --most-facts 2 "
    "--most-asked 4 --seeds 0",
    "hmt_perplexity": "--segment-length 16 --sensory-tokens 4 --first-steps 1 --steps 2 --rows 2 --segments 2 "
    "--text-length 64 --texts 4 --seeds 0 1",
}
ROWS = {
    "extrapolation": 4,
    "rope_base": 2,
    "rope_smollm2": 7,
    "llama_to_fox": 13,
    "hmt_facts": 10,
    "hmt_perplexity": 17,
}


def fork(command, check):
    """Run `python -m hf_longctx` without a new interpreter."""
    done = run(["python", *command[1:]])
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:.*more than the .* claims to support")
@pytest.mark.parametrize("name", TINY)
def test_an_experiment_keeps_its_parts(name, load, smollm2, tmp_path, capsys, monkeypatch):
    module = load(name)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=fork), raising=False)
    folders = f"--work {tmp_path}/work --output {tmp_path}/x.json --picture {tmp_path}/x.png"
    arguments = [*TINY[name].split(), *folders.split()]
    module.main(arguments)
    first, result = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    assert len(result["rows"]) == ROWS[name] and "| --- |" in first
    assert str(tmp_path) not in json.dumps(result["settings"])
    if name == "hmt_facts":  # a stage that does not solve its texts has four rounds; a window never could
        for stage in (0, 1):
            steps = {row["model"]: len(row["losses"][stage]) for row in result["rows"] if row["losses"]}
            in_one_round = steps.pop("window")
            assert set(steps.values()) == {4 * in_one_round}
    monkeypatch.setattr(module, "torch", None)  # what is kept is not computed again
    module.main(arguments)
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == result["rows"]


@pytest.mark.parametrize("name", ["hmt_facts", "hmt_perplexity", "llama_to_fox", "rope_smollm2"])
@pytest.mark.parametrize("missing", ["model", "text"])
def test_a_missing_model_or_text_is_an_error_that_says_how_to_make_it(name, missing, load, smollm2, tmp_path):
    module = load(name)
    (tmp_path / missing).rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=f"{missing} is missing.*\n.*scripts.fetch_smollm2 && .*demo_corpus"):
        module.main(["--work", f"{tmp_path}/work", "--output", f"{tmp_path}/x.json"])
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("step", [3, 7, 8], ids=["first stage", "second stage", "questions"])  # in the second round
def test_an_interrupted_training_on_facts_ends_as_one_that_was_not(step, load, smollm2, tmp_path, monkeypatch):
    module, steps = load("hmt_facts"), iter(range(100))

    def rows_of(folder):
        sizes = [
            *TINY["hmt_facts"].split(),
            *["--rounds", "2", "--first-steps", "2", "--save-steps", "1", "--methods"],
            "HMT, single pass",
        ]
        files = [f"--{name}={tmp_path}/{folder}/{name}" for name in ("work", "output", "picture")]
        module.main([*sizes, *files[:2], f"{files[2]}.png"])
        return json.loads((tmp_path / folder / "output").read_text())["rows"]

    def interrupted(function):
        def counted(*arguments):
            if next(steps) == step:
                raise KeyboardInterrupt
            return function(*arguments)

        return counted

    whole = rows_of("whole")
    monkeypatch.setattr(module, "F", SimpleNamespace(cross_entropy=interrupted(torch.nn.functional.cross_entropy)))
    monkeypatch.setattr(module, "ask", interrupted(module.ask))
    with pytest.raises(KeyboardInterrupt):
        rows_of("interrupted")
    assert rows_of("interrupted") == whole and not list(tmp_path.rglob("*.pt"))
    assert next(steps) == 11  # each of the 8 steps and 2 numbers of facts once, and the one interrupted


def test_what_is_done_so_far_is_shown_without_measuring_more(load, smollm2, tmp_path):
    module = load("hmt_facts")
    files = [f"--{name}={tmp_path}/{name}" for name in ("work", "output")]
    arguments = [*TINY["hmt_facts"].split(), *files, f"--picture={tmp_path}/x.png"]
    with pytest.raises(ValueError, match="none of these parts yet"):
        module.main([*arguments, "--so-far"])
    module.main([*arguments, "--methods", "BM25 and window, as it is"])
    measured = json.loads((tmp_path / "output").read_text())
    module.main([*arguments, "--so-far"])
    result = json.loads((tmp_path / "output").read_text())
    assert result["rows"] == measured["rows"] and "--so-far" in result["command"]
    assert "so_far" not in result["settings"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--most-facts 1", "--most-facts must be at least 2, and is 1"),
        ("--most-asked 1", "--most-asked must be at least 2, and is 1"),
        ("--save-steps 0", "--save-steps must be at least 1, and is 0"),
        ("--methods HMT", "--methods has .'HMT'.: choose from 'HMT, single pass'"),
        ("--segment-length 1024 --methods RMT window full attention", "--methods has .'attention', 'full'.: choose"),
        ("--segment-length 1024", "full attention reads at most 1 facts and a question in its 2048 tokens"),
    ],
)
def test_options_that_cannot_work_are_refused_before_training(options, message, load, smollm2, tmp_path):
    arguments = [*options.split(), "--work", f"{tmp_path}/work", "--output", f"{tmp_path}/x.json"]
    with pytest.raises(ValueError, match=message):
        load("hmt_facts").main(arguments)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_fox_reads_on_where_rope_fails(rows):
    curves = {
        (name, model): [row[name] for row in rows("extrapolation_128") if row["model"] == model]
        for name in ("known", "unseen")
        for model in ("FoX", "RoPE")
    }
    assert all(len(seeds) == 3 for seeds in curves.values())
    assert all(curve[-1] < curve[3] for curve in curves["known", "FoX"]), "the loss falls beyond the training length"
    assert all(curve[-1] > curve[3] for curve in curves["known", "RoPE"]), "and rises"
    assert max(curve[-1] for curve in curves["unseen", "FoX"]) < min(curve[-1] for curve in curves["unseen", "RoPE"])


def test_a_fox_trained_at_512_tokens_reads_2048_better_than_rope(rows):
    several = rows("extrapolation_512")
    pairs = [[row for row in several if row["seed"] == seed] for seed in range(3)]
    for fox, rope in pairs:
        assert (fox["model"], rope["model"]) == ("FoX", "RoPE")
        assert all(
            fox["known"][i] < rope["known"][i] and fox["unseen"][i] < 4.16 < rope["unseen"][i] for i in range(4, 16)
        )


def test_a_base_below_the_bound_costs_retrieval_and_not_what_is_near(rows):
    after = {base: [row["after"] for row in rows("rope_base") if row["base"] == base] for base in (100, 10_000)}
    assert len(after[100]) == len(after[10_000]) == 3
    assert max(share for entry in after[100] for share in entry["retrieved"]) < 0.1
    assert min(share for entry in after[10_000] for share in entry["retrieved"]) > 0.9
    assert all(abs(a["runs"] - b["runs"]) < 0.05 for a, b in zip(after[100], after[10_000]))


def test_smollm2_is_a_fox_of_the_same_loss_which_training_lowers_as_it_does_the_llamas(rows):
    losses = {row["model"]: sum(row["losses"]) / 8 for row in rows("llama_to_fox") if row["kind"] == "loss"}
    assert losses["FoX, open gates"] == pytest.approx(losses["Llama"], abs=1e-4)
    gains = [losses["Llama"] - losses[model] for model in ("Llama, LoRA", "FoX, LoRA")]
    assert min(gains) > 0.05 and gains[0] == pytest.approx(gains[1], abs=0.02)


def test_training_wins_back_a_part_of_what_another_base_costs_smollm2(rows):
    loss = {row["model"]: row["second"] for row in rows("rope_smollm2") if row["kind"] == "loss"}
    assert loss["as it is, trained"] < loss["as it is"] < loss["other base, trained"] < loss["other base"]
