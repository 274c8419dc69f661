"""The commands, on a small model with random weights."""

import io
import json
import re
import shlex
import sys
import types

import pytest
import torch
import transformers
from commands import run
from demo_model import DEMO
from transformers import LlamaConfig

from hf_longctx import __version__, cli
from hf_longctx.training.config import FinetuneConfig, PretrainConfig, make_parser


def test_rope_tells_the_verdict(tmp_path, capsys):
    LlamaConfig(max_position_embeddings=512).save_pretrained(tmp_path)
    assert cli.main(["rope", str(tmp_path)]) == 0
    assert "10000" in capsys.readouterr().out
    assert cli.main(["rope", str(tmp_path / "config.json"), "--json", "--context-length", "300"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.main(["rope", str(tmp_path), "--output", str(tmp_path / "new" / "rope.svg")]) == 0
    assert "<svg" in (tmp_path / "new" / "rope.svg").read_text()
    assert "wrote" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_have_hyphens_or_underscores(command):
    if command in cli.TRAINING:
        options = make_parser({"train": PretrainConfig, "finetune": FinetuneConfig}[command])._option_string_actions
        options = [option for option in options if option.startswith("--")]
    else:
        options = cli.option_names(cli.parser([command]), command)
    hyphens, underscores = (
        ["--" + option[2:].replace(old, new) for option in options] for old, new in (("_", "-"), ("-", "_"))
    )
    for spelled in (hyphens, underscores):
        assert set(cli.respell(spelled, options)) <= {*options}
    assert cli.respell(["--a_b", "--", underscores[0]], options) == ["--a_b", "--", underscores[0]]


def test_both_spellings_reach_the_command(monkeypatch):
    seen = []
    monkeypatch.setattr(cli.read, "run", seen.append)
    for spelled in ("--max_new_tokens", "--max-new-tokens", "--max_new-tok"):
        cli.main(["read", "MODEL", "TEXT", "Once", spelled, "3"])
    monkeypatch.setattr("hf_longctx.training.run.train", seen.append)
    for spelled in (
        "--max_length=64",
        "--max-length=64",
        "--max-length=64 --no_packing",
        "--max_length=64 --no-packing",
    ):
        line = f"train --data x --tokenizer t --output-dir run --report_to none {spelled}"
        cli.main(line.split())
    assert [args.max_new_tokens for args in seen[:3]] == [3] * 3 and [s.max_length for s in seen[3:]] == [64] * 4
    assert [s.packing for s in seen[3:]] == [True, True, False, False]


def test_lm_eval_gets_underscores(monkeypatch, capsys):
    seen = []
    program = types.ModuleType("lm_eval.__main__")
    program.cli_evaluate = lambda: seen.append(sys.argv)
    for name, module in {"lm_eval": types.ModuleType("lm_eval"), "lm_eval.__main__": program}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "hf_longctx.lm_eval.model", types.ModuleType("model"))
    for spelled in ("--model_args", "--model-args"):
        assert cli.main(["lm-eval", "run", spelled, "a-b=c", "--include-path", "x-y"]) == 0
    assert seen == [["lm_eval", "run", "--model_args", "a-b=c", "--include_path", "x-y"]] * 2
    assert cli.main(["lm-eval", "--tasks_folder"]) == 0 and "lm_eval" in capsys.readouterr().out


def test_text_that_is_not_utf_8(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\0bad"), encoding="utf-8"))
    assert cli.main(["read", str(folder), "-"]) == 2
    assert "'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


def test_the_package_is_a_module_and_a_closed_pipe_is_no_traceback():
    command = f"""
import os, sys
from hf_longctx.cli import main
reads, writes = os.pipe()
os.close(reads)
sys.stdout = os.fdopen(writes, "w")
status = main(["rope", {str(DEMO.parent / "llama-demo")!r}])
sys.stdout.flush()  # as Python does in the end
sys.exit(status)
"""
    assert run(["python", "-m", "hf_longctx", "--version"]).stdout == f"hf-longctx {__version__}\n"
    done = run(["python", "-c", command])
    assert done.returncode == 141 and "roken" not in done.stderr


@pytest.mark.usefixtures("undrawn")
def test_gates_draws_a_picture(folder, tmp_path, capsys):
    output = tmp_path / "new folder" / "gates.png"
    assert cli.main(["gates", str(folder), "--tokens", "40", "--layers", "0", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "40 tokens" in capsys.readouterr().out


def test_convert_there_and_back_and_from_a_llama(folder, tmp_path):
    def convert(source, *options):
        output = tmp_path / options[1]
        assert cli.main(["convert", str(source), str(output), *options]) == 0
        return json.loads((output / "config.json").read_text())

    assert convert(folder, "--to", "official")["model_type"] == "forgetting_transformer-project_fox"
    (tmp_path / "official").rename(tmp_path / "moved")
    assert convert(tmp_path / "moved", "--from", "official")["model_type"] == "fox"
    llama = DEMO.parent / "llama-demo"
    assert convert(llama, "--from", "llama", "--decay-time", "4096")["decay_time_max"] == 4096


def test_revisions_reach_whatever_is_loaded(folder, monkeypatch, capsys):
    calls = []

    def load(name, **options):
        calls.append({key: options[key] for key in ("revision", "trust_remote_code")})
        raise OSError("no such revision")

    options = ["--revision", "v1", "--trust-remote-code"]
    with_code = {"auto_map": {"AutoConfig": "code.Config"}}
    monkeypatch.setattr("hf_longctx.metrics.rope.config.read_files", lambda name, **options: (with_code, {}))
    for loader in ("AutoModelForCausalLM", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", load)
    for arguments in (["gates", "no/model"], ["curve", "no/model"], ["rope", "no/model"]):
        assert cli.main([*arguments, *options]) == 2
    assert calls == [{"revision": "v1", "trust_remote_code": True}] * 4


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_reads_well_and_its_examples_are_understood(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "None" not in text and f"Examples:\n  hf-longctx {command}" in text
    examples, parser = cli.COMMANDS[command].__doc__.partition("Examples:\n")[2], cli.parser([command])
    for arguments in re.findall(r"hf[-_]longctx (.*)", examples):
        name, *words = shlex.split(arguments)
        if command in cli.TRAINING:
            parser = make_parser({"train": PretrainConfig, "finetune": FinetuneConfig}[name])
            for action in parser._actions:
                action.required = False  # the file of --config can contain them
            assert parser.parse_args(words).output_dir == "run" and name == command
        else:
            assert parser.parse_args([name, *words]).command == command


def test_an_interruption_is_no_traceback(folder, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", interrupt)
    assert cli.main(["gates", str(folder)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_env_names_versions_and_attention(capsys):
    assert cli.main(["env"]) == 0
    rows = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["transformers"] == transformers.__version__ and rows["torch"] == torch.__version__
    assert rows["lm-eval"] and rows["attention of a FoX ('auto'), 1 tokens"] == "sdpa"
