"""What users of the command line get wrong: each row is answered by one line and exit status 1 or 2, no traceback.

A row is a command line and what its error says. Names in braces stand for paths, see `places`.
"""

import io
import json
import re
import shutil
import struct

import pytest
import torch
from demo_model import VOCABULARY
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx import cli
from hf_longctx.metrics import CurvePoint, ForgettingCurve


# -- what the words of the parser do not allow

PARSER = [
    ("", "required: COMMAND"),
    ("generat {fox} x", "invalid choice: 'generat'"),
    ("--verbose generate {fox} x", "required|unrecognized"),
    ("generate", "required: MODEL, PROMPT"),
    ("generate {fox} x y", "unrecognized arguments: y"),
    ("generate {fox} x --max-new-tokens many", "invalid int value: 'many'"),
    ("generate {fox} x --seed -1", r"--seed: -1 must be from 0 to"),
    ("serve", "required: MODEL"),
    ("gates {fox} --layers first", "invalid int value: 'first'"),
    ("convert {fox}", "required: DST"),
    ("convert {fox} {new}", "one of the arguments --from --to is required"),
    ("convert {fox} {new} --from official --to fla", "not allowed with argument"),
    ("convert {fox} {new} --from gpt2", "invalid choice: 'gpt2'"),
    ("convert {fox} {new} --to llama", "invalid choice: 'llama'"),
    ("convert {llama} {new} --from llama --decay-time long", "invalid float value: 'long'"),
    ("push {fox}", "required: REPO"),
    ("push {fox} alice/fox --token hf_secret", "unrecognized arguments: --token"),
    ("push-metric alice/curve", "required: REPO"),
    ("curve {fox} --protocol fast", "invalid choice: 'fast'"),
    ("curve {fox} --data-type words", "invalid choice: 'words'"),
    ("curve {fox} --timeout soon", "invalid float value: 'soon'"),
    ("needle {fox} --mode hard", "invalid choice: 'hard'"),
    ("needle {fox} --score best", "invalid choice: 'best'"),
    ("lines {fox} --lines few", "'few'; give whole numbers"),
    ("compare", "required: FILE.json"),
    ("rope {llama} --context-length 4k", "invalid int value: '4k'"),
    ("register-metrics curve", "unrecognized arguments: curve"),
]

# -- generate: options, before the model is loaded

OPTIONS = [
    (["generate", "{nowhere}", ""], "prompt is empty"),
    ("generate {nowhere} -", "prompt is empty"),
    ("generate {fox} x --max-new-tokens 0", "max_new_tokens. must be greater than 0"),
    ("generate {nowhere} x --temperature -1", "--temperature is -1.0"),
    ("generate {nowhere} x --temperature nan", "--temperature is nan"),
    ("generate {nowhere} x --top-p 1.5", "--top-p is 1.5"),
    ("generate {nowhere} x --top-k 0", "--top-k is 0"),
    ("generate {nowhere} x --temperature 0 --top-p 0.9", "need sampling"),
    (["generate", "{nowhere}", "x", "--stop", ""], "--stop is empty"),
    ("generate {fox} x --revision v1", "--revision v1 is for a model on the Hub"),
    ("generate {fox} x --code-revision v1", "--code-revision needs --trust-remote-code"),
    ("generate {no_template} x --chat", "no chat template"),
]

# -- models that are not there, or are damaged

MODELS = [
    ("generate {nowhere} x", "there is no folder .*nowhere"),
    ("generate ./nowhere x", r"there is no folder \./nowhere"),
    ("generate {fox}/config.json x", "is a file; give the folder"),
    ("generate {empty} x", r"config\.json"),
    ("generate no-such/model x", "couldn't connect"),
    ("generate {fox} x --device banana", "--device banana cannot be had"),
    ("generate {fox} x --device meta", "--device meta cannot be had"),
    pytest.param(
        ("generate {fox} x --device cuda", "--device cuda cannot be had"),
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there"),
    ),
    ("generate {no_weights} x", r"model\.safetensors"),
    ("generate {half_weights} x", "cannot be loaded.*damaged"),
    ("generate {empty_weights} x", "cannot be loaded.*damaged"),
    ("generate {no_tensors} x", "cannot be loaded.*damaged"),
    ("generate {huge_header} x", "cannot be loaded.*damaged"),
    ("generate {nan_weights} x --temperature 0", "logits of .* after 2 tokens are NaN"),
    ("generate {nan_weights} x --temperature 1", "logits of .* after 2 tokens are NaN"),
    ("generate {config_is_text} x", "config.json.*not a valid JSON"),
    ("generate {config_is_a_list} x", "model_type|Unrecognized"),
    ("generate {no_model_type} x", "model_type|Unrecognized model"),
    ("generate {model_type=nonsense} x", "nonsense"),
    ("generate {hidden_act=bogus} x", "bogus"),
    ("generate {llama_hidden_act=bogus} x", "cannot be loaded.*bogus"),
    ("generate {llama_dtype=float7} x", "float7"),
    ("generate {num_attention_heads=0} x", "num_attention_heads"),
    ("generate {pad_token_id=99999} x", "pad_token_id|Padding_idx"),
    ("generate {hidden_size=64} x", "size|mismatch"),
    ("generate {no_tokenizer} x", "no tokenizer that can be loaded"),
    ("generate {bad_tokenizer} x", "no tokenizer that can be loaded|tokenizer"),
    ("serve {nowhere}", "there is no folder|pip install"),
    ("gates {nowhere}", "there is no folder"),
    ("gates {fox}/config.json", "is a file"),
    ("rope {nowhere}", "there is no folder"),
    ("rope {empty}", r"config\.json"),
    ("rope {config_is_text}", "JSON"),
    ("rope {fox}", "RoPE"),
    ("rope {llama} --context-length 0", "context to check .* must be at least 2, got 0"),
    ("report {nowhere} --output {new}", "there is no folder"),
]

# -- gates, convert, compare

FILES = [
    ("gates {fox} --text {text} --layers 99", r"layers is \[99\]"),
    ("gates {fox} --text {text} --layers -1", r"layers is \[-1\]"),
    ("gates {fox} --text {text} --heads 99", r"heads is \[99\]"),
    ("gates {nowhere} --tokens 0", "--tokens is 0"),
    ("gates {nowhere} --tokens -5", "--tokens is -5"),
    ("gates {fox} --text {nowhere}.txt", r"nowhere\.txt"),
    ("gates {nowhere} --output {empty}", "is a folder; name a file in it"),
    ("gates {nowhere} --output {empty_file}/gates.png", "not a folder that you may write into"),
    ("gates {llama} --text {text}", "FoX"),
    ("convert {nowhere} {new} --from official", "nowhere"),
    ("convert {fox}/config.json {new} --from official", r"config\.json"),
    ("convert {empty} {new} --from official", r"config\.json"),
    ("convert {fox} {empty_file} --to official", "empty_file"),
    ("convert {fox} {fox} --to official", "exists|same|empty"),
    ("convert {fox} {empty_file}/new --to official", "empty_file"),
    ("convert {fox} {new} --to fla", "cannot be written for flash-linear-attention"),
    ("convert {fox} {new} --from official", "official|forgetting_transformer|model_type"),
    ("convert {fox} {new} --from llama", "llama|model_type"),
    ("convert {llama} {new} --from fla", "fla|model_type"),
    ("convert {llama} {new} --to official", "model_type|FoX|fox"),
    ("convert {llama} {new} --from llama --decay-time -1", "decay"),
    ("convert {llama} {new} --from llama --decay-time 0", "decay"),
    ("convert {llama} {new} --from llama --decay-time nan", "decay"),
    ("convert {fox} {new} --to official --decay-time 5", "decay"),
    ("convert {no_weights} {new} --to official", r"lacks model\.safetensors"),
    ("convert {half_weights} {new} --to official", "not a sound safetensors file"),
    ("convert {empty_weights} {new} --to official", "not a sound safetensors file"),
    ("convert {config_is_text} {new} --to official", "is not JSON"),
    ("convert {config_is_a_list} {new} --to official", "not a JSON object"),
    ("convert {pickled} {new} --to official", r"pytorch_model\.bin: load and save"),
    ("convert {index} {new} --to official", r"lacks part\.safetensors"),
    ("push {nowhere} alice/fox --dry-run", "nowhere"),
    ("push {empty} alice/fox --dry-run", "lacks config.json or"),
    ("push {fox}/config.json alice/fox --dry-run", r"config\.json"),
    ("push {pickled} alice/fox --dry-run", r"pytorch_model\.bin is a pickle"),
    ("push {half_weights} alice/fox --dry-run", "not a sound safetensors file"),
    ("push {config_is_text} alice/fox --dry-run", "is not JSON"),
    ("push {fox} fox --dry-run", "give NAMESPACE/NAME"),
    ("push-metric position_loss https://huggingface.co/alice/loss --dry-run", "give NAMESPACE/NAME"),
    ("push {fox} alice/fox --revision= --dry-run", "'' is not a name of a branch or tag"),
    ("card {fox} --repo fox", "give NAMESPACE/NAME"),
    ("card {fox} --repo alice/fox --tag a..b", "'a..b' is not a name of a branch or tag"),
    ("push {fox} alice/fox/v1 --dry-run", "alice/fox/v1"),
    ("push-metric perplexity alice/perplexity --dry-run", "no evaluate module 'perplexity'"),
    ("compare {nowhere}.json", r"nowhere\.json"),
    ("compare {empty}", "empty"),
    ("compare {fox}/config.json", "no saved result"),
    ("compare {text}", "no saved result"),
    ("compare {curve} --names a b", "2 names for 1 files"),
    ("compare {curve} {curve} --names a a", "give each file a different one"),
    ("compare {curve} --output {empty_file}/picture.png", "empty_file"),
]

# -- measuring: options that all commands share

MEASURING = [
    ("curve {nowhere}", "there is no folder"),
    ("loss {nowhere}", "there is no folder"),
    ("needle {nowhere}", "there is no folder"),
    ("lines {nowhere}", "there is no folder"),
    ("curve {empty}", r"config\.json"),
    ("curve {no_weights}", r"model\.safetensors"),
    ("curve {fox} --text {empty}", "no text|holds no|no .*txt"),
    ("curve {fox} --text {nowhere}.txt", r"nowhere\.txt is neither a file nor a folder"),
    ("curve {fox} --served-as x", "for a served model; give its --endpoint"),
    ("loss {fox} --api-key-env HOME", "for a served model; give its --endpoint"),
    ("needle {fox} --timeout 3", "for a served model; give its --endpoint"),
    ("lines {fox} --retries 3", "for a served model; give its --endpoint"),
    ("report {fox} --concurrency 3", "for a served model; give its --endpoint"),
    ("curve {fox} --endpoint localhost:8000", "give one like http://localhost:8000/v1"),
    (
        "curve {fox} --endpoint http://localhost:1/v1 --api-key-env NO_SUCH",
        "NO_SUCH: this environment variable is not set",
    ),
    ("curve {fox} --endpoint http://localhost:1/v1 --timeout 0", "timeout 0"),
    ("curve {fox} --endpoint http://localhost:1/v1 --retries -1", "retries -1"),
    ("curve {fox} --endpoint http://localhost:1/v1 --concurrency 0", "concurrency is 0"),
    ("curve {fox} --endpoint http://localhost:1/v1 --retries 0", "cannot be reached"),
    ("curve {nowhere} --endpoint http://localhost:1/v1 --retries 0", "there is no folder"),
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
    ForgettingCurve([CurvePoint(8, [4, 4], [1, 1])], {"model": "fox"}).save(root / "curve.json")
    paths = {"fox": folder, "llama": llama, "text": root / "text.txt", "curve": root / "curve.json"}
    paths |= {name: root / name for name in ("nowhere", "empty", "empty_file")}

    def copy(name, *leave_out, of=folder):
        paths[name] = root / name
        return shutil.copytree(of, root / name, ignore=shutil.ignore_patterns(*leave_out, "*.py"))

    weights = (folder / "model.safetensors").read_bytes()
    copy("no_weights", "model.safetensors")
    copy("no_template", "chat_template.jinja")
    copy("no_tokenizer", "tokenizer*")
    (copy("bad_tokenizer") / "tokenizer.json").write_text("{")
    (copy("half_weights") / "model.safetensors").write_bytes(weights[:1000])
    (copy("empty_weights") / "model.safetensors").write_bytes(b"")
    (copy("no_tensors") / "model.safetensors").write_bytes(b"weights " * 9)
    (copy("huge_header") / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + weights[8:])
    tensors = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, copy("nan_weights") / "model.safetensors", metadata={"format": "pt"})
    copy("pickled", "model.safetensors").joinpath("pytorch_model.bin").touch()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "part.safetensors"}}
    (copy("index", "model.safetensors") / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy("config_is_text") / "config.json").write_text("a fox")
    (copy("config_is_a_list") / "config.json").write_text("[]")

    def reconfigured(name, of=folder, **fields):
        path = copy(name, of=of) / "config.json"
        config = json.loads(path.read_text()) | fields
        config.pop("auto_map", None)
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    reconfigured("no_model_type", model_type=None)
    reconfigured("model_type=nonsense", model_type="nonsense")
    reconfigured("hidden_act=bogus", hidden_act="bogus")
    reconfigured("llama_hidden_act=bogus", of=llama, hidden_act="bogus")
    reconfigured("llama_dtype=float7", of=llama, dtype="float7")
    reconfigured("num_attention_heads=0", num_attention_heads=0)
    reconfigured("pad_token_id=99999", pad_token_id=99999)
    reconfigured("hidden_size=64", hidden_size=64)
    return paths


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [*PARSER, *OPTIONS, *MODELS, *FILES, *MEASURING], ids=lambda row: str(row[0]))
def test_a_mistake_is_one_line(row, places, tmp_path, monkeypatch, capsys, record_property):
    command, message = row
    arguments = command.split() if isinstance(command, str) else command
    for name, path in {**places, "new": tmp_path / "new"}.items():
        arguments = [argument.replace(f"{{{name}}}", str(path)) for argument in arguments]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
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
    record_property("mistake", "refused")
