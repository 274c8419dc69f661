"""Mistakes of users of the command line: each row prints one line without a traceback, and exits with 1 or 2.

A row is a command line and what its error says. Names in braces stand for paths, see `places`.
"""

import io
import re
import shutil

import pytest
import torch
from demo_model import DEMO, VOCABULARY
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx import cli
from hf_longctx.metrics import CurvePoint, ForgettingCurve, PositionLoss


# -- what the words of the parser do not allow

PARSER = [
    ("", "required: COMMAND"),
    ("read", "required: MODEL, DOCUMENT"),
    ("lines {fox} --lines few", "'few'; give numbers"),
    ("curve {fox} --max_lenght 3", "unrecognized arguments: --max_lenght 3. Did you mean --max-length.$"),
    ("train --max-lenght 3 --data x", "unrecognized arguments: --max-lenght. Did you mean --max-length.$"),
    ("needle {fox} --bogus", "unrecognized arguments: --bogus.$"),
]

# -- options, before the model is loaded

OPTIONS = [
    ("read {hmt} {facts} Ada --max-new-tokens 0", "max_new_tokens. must be greater than 0"),
    ("read {hmt} memory.safetensors", "is a saved memory. Give a QUESTION"),
    ("read {hmt} memory.safetensors Ada", "memory.safetensors does not exist"),
    ("read {hmt} {facts} --output {facts}", "is not a complete file written by HMTState.save"),
    ("read {hmt} {facts} --output {nowhere}/x", "The output folder .* does not exist"),
    ("read {hmt} {facts} Ada --temperature -1", "--temperature must be at least 0, got -1.0"),
    ("gates {fox} --revision v1", "--revision v1 is for a model on the Hub"),
    ("read {nan_weights} {facts} Ada --temperature 0", "NaN logits after .* tokens"),
    ("read {hmt} {text} Foxes", "cannot encode the text .*Missing .UNK. token"),
]

# -- models that are not there, or are damaged

MODELS = [
    ("read {fox}/config.json {text}", "is a file; give the folder"),
    ("read no-such/model {text}", "couldn't connect"),
    ("read {fox} {text} --device banana", "device banana is not available"),
    ("read {half_weights} {text}", "cannot be loaded.*damaged"),
    ("read {no_tokenizer} {text}", "does not contain a tokenizer that can be loaded"),
    ("rope {fox}", "rotary position embedding"),
    ("rope {nowhere}/x", "the folder .* does not exist"),
]

# -- gates, convert, compare

FILES = [
    ("gates {fox} --text {text} --layers 99", r"layers must be .* got \[99\]"),
    ("gates {llama} --text {text}", "FoX"),
    ("convert {fox} {empty_file} --to official", "empty_file"),
    ("convert {fox} {new} --from official", "official|forgetting_transformer|model_type"),
    ("convert {fox} {new} --to official --decay-time 5", "decay"),
    ("push {fox} fox --dry-run", "Give NAMESPACE/NAME"),
    ("push forgetting_curve https://huggingface.co/alice/curve --dry-run", "Give NAMESPACE/NAME"),
    ("push {fox} alice/fox --revision= --dry-run", "'' is not a valid name of a branch or tag"),
    ("compare", "FILE.json"),
    ("compare {empty}", "empty"),
    ("compare {curve} {loss}", "must be from one metric .*ForgettingCurve, PositionLoss"),
    ("compare {curve} {curve} --names a a", "2 names for 2 files. Give each file a different name"),
    ("compare {curve} --output {empty_file}/picture.png", "empty_file"),
]

# -- measuring: errors before a model is loaded and before a file is written

MEASURING = [
    ("needle {fox} --lengths 5 --text stdlib", "lengths must be above .*the tokens of needle"),
    ("curve {fox} --lengths 8,16 --points 5", "lengths cannot be combined with points"),
    ("curve {fox} --data-type random --text {text}", "--text is not used with these options"),
    ("curve {fox} --confidence 0.9", "protocol=reference cannot be combined with confidence"),
    ("curve {fox} --output /proc/x", "--output: /proc is not a writable folder"),
    ("report {fox} --output {empty_file}", "empty_file is not a writable folder"),
    ("curve {nowhere}", "the folder .* does not exist"),
    ("curve {fox} --served-as x", "require --endpoint"),
    ("curve {fox} --endpoint localhost:8000 --retries 0", "unknown url type: localhost"),
    (
        "curve {fox} --endpoint http://localhost:1/v1 --api-key-env NO_SUCH",
        "NO_SUCH: this environment variable is not set",
    ),
    ("curve {fox} --endpoint http://localhost:1/v1 --retries 0", "cannot be reached"),
    ("curve {fox} --endpoint http://localhost:1/v1 --cache full", "--cache requires a local model"),
    ("report {fox} --output {empty} --endpoint http://localhost:1/v1 --cache full", "--cache requires a local model"),
    ("curve {fox} --cache quantised:4 --text stdlib", "cache must be full, quantized:BITS, .*got 'quantised:4'"),
    ("lines {fox} --query-aware", "query_aware requires a cache for the context. Add --cache"),
    ("lines {fox} --cache no_such_package.Press:0.5", "needs no_such_package. Install it with pip"),
]


@pytest.fixture(scope="session")
def places(folder, tmp_path_factory):
    """Paths by the names that the rows have for them; damaged models are copies of a tiny one."""
    root = tmp_path_factory.mktemp("places")
    llama = root / "llama"
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(llama)
    AutoTokenizer.from_pretrained(folder).save_pretrained(llama)
    (root / "text.txt").write_text("In this line the foxes of a village met. " * 9)
    (root / "empty").mkdir()
    (root / "empty_file").touch()
    ForgettingCurve.of_points([CurvePoint(8, [4, 4], [1, 1])], {"model": "fox"}).save(root / "curve.json")
    PositionLoss.of_mean([2.0, 1.0], 1).save(root / "loss.json")
    paths = {"fox": folder, "llama": llama, "curve": root / "curve.json", "loss": root / "loss.json"}
    paths |= {"text": root / "text.txt", "hmt": DEMO.parent / "hmt-demo"}
    paths |= {name: root / name for name in ("nowhere", "empty", "empty_file")}

    def copy(name, *leave_out, of=folder):
        paths[name] = root / name
        return shutil.copytree(of, root / name, ignore=shutil.ignore_patterns(*leave_out, "*.py"))

    copy("no_tokenizer", "tokenizer*")
    (copy("half_weights") / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    nan_weights = copy("nan_weights", of=paths["hmt"]) / "model.safetensors"
    tensors = load_file(nan_weights)
    tensors["backbone.lm_head.weight"][0] = torch.nan
    save_file(tensors, nan_weights, metadata={"format": "pt"})
    (root / "facts.txt").write_text("remember Ada red Ada the of")
    paths["facts"] = root / "facts.txt"
    return paths


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [*PARSER, *OPTIONS, *MODELS, *FILES, *MEASURING], ids=lambda row: str(row[0]))
def test_a_mistake_is_one_line(row, places, tmp_path, monkeypatch, capsys):
    command, message = row
    arguments = command.split() if isinstance(command, str) else command
    for name, path in {**places, "new": tmp_path / "new"}.items():
        arguments = [argument.replace(f"{{{name}}}", str(path)) for argument in arguments]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    if row in MEASURING:
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    errors = capsys.readouterr().err
    *_, last = errors.splitlines()
    start = re.search(r"hf-longctx( [a-z-]+)?: error: ", last)
    assert status in (1, 2) and start and errors.count(": error: ") == 1 and "Traceback" not in errors
    assert re.search(message, last[start.end() :])
    assert len(last) < 1000
    assert row not in MEASURING or not [*tmp_path.iterdir()]
