"""What users of the measuring commands get wrong: one line each, and the model is not loaded for it."""

import json

import pytest
from mistakes import refused

from hf_longctx import cli


QUICK = {
    "curve": "curve {folder} --text stdlib --lengths 8,16 --repeats 1 --output {tmp}/a",
    "loss": "loss {folder} --text stdlib --context-length 20 --sequences 1 --output {tmp}/a",
    "needle": "needle {folder} --text stdlib --lengths 400 --no-replies --output {tmp}/a",
    "lines": "lines {folder} --lines 3 --repeats 1 --no-replies --output {tmp}/a",
    "several": "several {folder} --text stdlib --lengths 900 --output {tmp}/a",
    "report": "report {folder} --text stdlib --output {tmp}/a",
    "compare": "compare --output {tmp}/a",
    "rope": "rope {tmp}/refused",
    "gates": "gates {folder} --text stdlib --output {tmp}/a",
}


def mistake(name, arguments, message):
    """Arguments of a command after those of QUICK; what argparse refuses ends with status 2."""
    command, _, options = arguments.partition(" ")

    def call(names, capsys):
        try:
            status = cli.main([part.format(**names) for part in f"{QUICK[command]} {options}".split()])
        except SystemExit as stop:
            status = stop.code
        error = capsys.readouterr().err.splitlines()[-1]
        assert status in (1, 2) and error.startswith("hf-longctx")
        raise ValueError(error)

    return refused(f"{command}: {name}", call, message)


MISTAKES = [
    mistake("one point", "curve --lengths 8 --points 1", "--points is 1; it must be at least 2"),
    mistake("no repeats", "curve --repeats 0", "--repeats is 0; it must be at least 1"),
    mistake("no hops", "several --hops 0", "--hops is 0; it must be at least 1"),
    mistake("one needle", "several --needles 1", "--needles is 1; it must be at least 2"),
    mistake("negative training", "curve --train-length -5", "--train-length is -5"),
    mistake("falling lengths", "curve --lengths 16,8", "strictly ascending"),
    mistake("lengths in words", "curve --lengths 8,many", "invalid literal .*'many'; give whole numbers"),
    mistake("lengths beyond the text", "curve --lengths 99999", r"The longest possible length is 15\d\d\d:"),
    mistake("lengths and a grid", "curve --points 5", "--lengths and --points exclude each other"),
    mistake("lengths and their end", "curve --max-length 5", "--lengths and --max-length exclude"),
    mistake("text for random tokens", "curve --data-type random", "--data-type random and --text exclude"),
    mistake("confidence without adaptive", "curve --confidence 0.9", "--protocol reference and --confidence exclude"),
    mistake("missing text", "curve --text {tmp}/no.txt", "no.txt is neither a file nor a folder"),
    mistake("short irrelevant text", "curve --irrelevant-text {tmp}/short.txt", "irrelevant_tokens has .* ids, fewer"),
    mistake("binary text", "curve --text {tmp}/binary", "binary is a binary file"),
    mistake(
        "output below a file",
        "curve --output {tmp}/short.txt/a",
        "--output .* cannot be written: .*short.txt is not a folder",
    ),
    mistake("output into a folder", "curve --output {tmp}", "--output .* is a folder; name a file in it"),
    mistake(
        "a picture in another format",
        "curve --output {tmp}/a.gif",
        "a.gif ends with .gif; a picture may end with .png",
    ),
    mistake(
        "a config that its class refuses", "rope", "refused cannot be loaded .*TypeError: .*; its files are damaged"
    ),
    mistake("missing device", "curve --device tpu", "--device tpu cannot be had"),
    mistake("no sequence", "loss --sequences 0", "--sequences is 0"),
    mistake("output below a file", "loss --output {tmp}/short.txt/a", "--output .* cannot be written"),
    mistake("one depth", "needle --depths 1", "--depths is 1; it must be at least 2"),
    mistake("too short for the needle", "needle --lengths 100", "length 100 is too short"),
    mistake("replies that are not there", "needle --score match_rate", "--score match_rate looks into replies"),
    mistake("no lines", "lines --lines 0", "a record has from 1 to 15872 lines, got 0"),
    mistake("no repeats", "lines --repeats 0", "--repeats is 0"),
    mistake(
        "a file for a folder", "report --output {tmp}/short.txt", "short.txt is not a folder that you may write into"
    ),
    mistake("two metrics", "compare {tmp}/curve.json {tmp}/loss.json", "give forgetting curves only, or"),
    mistake("sources of losses", "compare {tmp}/loss.json --test-sources", "their kind is position_loss"),
    mistake("a missing file", "compare {tmp}/no.json", "no.json"),
    mistake("output below a file", "gates --output {tmp}/short.txt/a", "--output .* cannot be written"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    (path / "short.txt").write_text("A word.")
    (path / "binary").write_bytes(b"ab\0cd")
    point = {"length": 8, "copy_correct": [4], "lm_correct": [0], "begin_locs": None}
    (path / "curve.json").write_text(
        json.dumps({"metric": "forgetting_curve", "format": 1, "settings": {}, "points": [point]})
    )
    loss = {
        "metric": "position_loss",
        "format": 1,
        "settings": {},
        "sequences": 1,
        "loss": [2.0, 1.0],
        "smoothed_error": None,
    }
    (path / "loss.json").write_text(json.dumps(loss))
    (path / "refused").mkdir()
    exaone = {"model_type": "exaone4", "sliding_window_pattern": "LLLG", "sliding_window": 8}
    (path / "refused" / "config.json").write_text(json.dumps(exaone))  # its layer types are missing
    return path


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_one_line_before_a_model_is_loaded(mistake, record_property, folder, files, capsys, monkeypatch):
    pytest.importorskip("datasets", reason="tables need datasets: pip install 'hf-longctx[metrics]'")

    def load(*_, **__):
        raise AssertionError("the model was loaded before the arguments were checked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    before = sorted(files.iterdir())
    record_property("mistake", mistake.check({"folder": folder, "tmp": files}, capsys))
    assert sorted(files.iterdir()) == before
