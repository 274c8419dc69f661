"""Every benchmark runs at a tiny size. Its JSON names command and machine, and its table shows the JSON."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "generate": "--context 16 --tokens 2 --rounds 1 --hidden 128 --layers 1 --vocab 64",
    "generate --cache static": "--context 16 --tokens 2 --rounds 1 --hidden 128 --layers 1 --vocab 64",
    "gpu.step": "--device cpu --rounds 1",
    "gpu.tune": "--device cpu --kernel forward decode",
    "pruned": "--contexts 64 --tolerances 1e-2 --tokens 2 --layers 1 --heads 2",
    "windows": "--contexts 300 --tokens 2 --rounds 1 --layers 1 --prefill-layers 1",
    "curve": "--setups small --scale 0.03",
    "hmt speed": "--size tiny --tokens 32 --segment-lengths 16 --sensory-tokens 4 --rounds 1",
    "hmt step": "--rounds 1",
    "hmt memory": "--lengths 300 600",
    "training_memory": "--models tiny --lengths 16 --vocab 64",
}
ROWS = {
    "generate": 3,
    "generate --cache static": 3,
    "gpu.step": 7,
    "gpu.tune": 5,
    "pruned": 4,
    "windows": 4,
    "hmt speed": 12,
}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are for machines without a GPU")


@pytest.fixture
def load(load_script, monkeypatch):
    """Import modules of scripts/bench, with fresh processes replaced by this one, which has imported everything."""
    common = load_script("bench.common")
    monkeypatch.setattr(common, "in_fresh_process", lambda function, *args: function(*args))
    return lambda name: load_script(f"bench.{name}")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_host_time(tmp_path):
    """In a fresh interpreter, because this one interprets kernels. FoX calls fewer operators than a Llama."""
    pytest.importorskip("triton")
    output, environment = tmp_path / "x.json", {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "scripts.bench.host_time", "--layers", "1", "--rounds", "1", "--output", output]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    llama, fox, pro = json.loads(output.read_text())["rows"]
    assert max(fox["operators"], pro["operators"]) < llama["operators"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # from numpy in the interpreter
@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_CPU) if "gpu" in name else name for name in TINY])
@torch.compiler.set_stance("force_eager")
def test_benchmark(load, name, tmp_path, capsys):
    if name == "gpu.tune":
        pytest.importorskip("triton")
    module, output = load(name.split()[0]), tmp_path / "x.json"
    module.main([*name.split()[1:], *TINY[name].split(), "--output", str(output)])
    printed, result = capsys.readouterr().out, json.loads(output.read_text())
    assert len(result["rows"]) == ROWS.get(name, 2)  # gpu.step: FLA is not installed
    assert result["machine"]["device"] and result["versions"]["torch"] and "commit" in result
    assert result["command"].endswith(" ".join([f"python -m scripts.bench.{name}", TINY[name]]))
    module.main(["--table", str(output)])
    table = capsys.readouterr().out
    assert "|---|" in table and printed.endswith(table)


@ON_CPU
@torch.compiler.set_stance("force_eager")
def test_all_gpu_benchmarks_dry_run(load, tmp_path, capsys, monkeypatch):
    """All parts but the tests run in this process, which has imported everything."""
    pytest.importorskip("triton")
    module = load("gpu.all")
    run_command = module.run_command

    def run_here(command, limit):
        if command[2] == "pytest":
            return run_command([*command[:3], "--version"], limit)
        if command[2] == "scripts.bench.pruned":  # it hangs
            return run_command([sys.executable, "-uc", "print('begun')\nwhile True: pass"], 0.5)
        status = importlib.import_module(command[2]).main(command[3:])
        return (status, "") if isinstance(status, int) else (0, "")

    monkeypatch.setattr(module, "run_command", run_here)
    monkeypatch.setattr(load("gpu.check"), "CANDIDATES", ["sdpa"])
    assert module.main(f"--device cpu --output {tmp_path}/gpu_all.json".split()) == 1
    rows = {row["part"]: row for row in json.loads((tmp_path / "gpu_all.json").read_text())["rows"]}
    assert list(rows) == list(module.PARTS)
    assert {name: row["status"] for name, row in rows.items() if row["status"]} == {"pruned": module.KILLED}
    files = {path.stem for path in tmp_path.glob("*.json")}
    assert files == {"gpu_all", *module.PARTS} - {"tests", "pruned"}
    assert rows["pruned"]["seconds"] < 30  # its limit is half a second
    assert rows["pruned"]["tail"] == "begun" and "| -9 |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["generate", "generate --cache static", "pruned", "hmt speed"])
@torch.compiler.set_stance("force_eager")
def test_the_first_row_is_written_before_anything_else_is_built_or_measured(load, name, tmp_path, monkeypatch):
    module, common, events = load(name.split()[0]), load("common"), []
    builder = {"pruned": (module, "PrunedCache"), "hmt speed": (module, "LlamaForCausalLM")}
    places = {
        "built": builder.get(name) or (module.AutoModelForCausalLM, "from_config"),
        "measured": (common, "alternate"),
        "written": (common, "save"),
    }
    for event, (owner, attribute) in places.items():
        function = getattr(owner, attribute)
        spy = lambda *args, f=function, x=event, **kwargs: events.append(x) or f(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(owner, attribute, spy)
    module.main([*name.split()[1:], *TINY[name].split(), "--output", str(tmp_path / "x.json")])
    assert events[:3] == ["built", "measured", "written"]


def test_a_killed_part_retains_its_first_row(load, tmp_path, monkeypatch):
    """The second part fails without a row. The file of the first one is then not taken for its own."""
    module = load("gpu.all")
    codes = {
        "generate": """
import os, signal
from scripts.bench import common

def measure(args):
    yield {"row": 1}
    os.kill(os.getpid(), signal.SIGKILL)

common.run(common.make_parser("x", ""), measure, str)
""",
        "pruned": "raise SystemExit(3)",
    }
    output = str(tmp_path / "part.json")
    monkeypatch.setattr(
        module, "make_command", lambda part, *_: [sys.executable, "-c", codes[part], "--output", output]
    )
    assert module.main(f"--device cpu --parts generate pruned --output {tmp_path}/gpu_all.json".split()) == 1
    killed, failed = json.loads((tmp_path / "gpu_all.json").read_text())["rows"]
    part = json.loads(Path(output).read_text())
    assert part["rows"] == [{"row": 1}] and killed["status"] == module.KILLED
    assert killed["rows"] == 1 and part["first_row_seconds"] == killed["first_row_seconds"]
    assert 0 < part["first_row_seconds"] < killed["seconds"] + 1
    assert failed["status"] == 3 and failed["rows"] == 0 and "first_row_seconds" not in failed


def test_in_eleven_minutes_decoding_and_hmt_have_75_seconds_each(load):
    parts = load("gpu.all").PARTS
    seconds = {name: 11 * 60 * part.share / sum(x.share for x in parts.values()) for name, part in parts.items()}
    assert all(seconds[name] >= 75 for name, part in parts.items() if not part.takes_minutes)


def test_contenders_take_turns_and_the_first_round_warms_up(load):
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    assert load("common").alternate(contenders, rounds=2) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert calls == list("ababab")
    assert len(load("common").alternate(contenders, rounds=9, until=0.0)["a"]) == 3, "three rounds even without time"


def test_a_table_leaves_out_cells_and_columns_without_values(load):
    rows = [{"n": 1, "share": 0.25}, {"n": 2, "share": None}]
    template = "| N | share | error |\n| {n} | {share:.0%} | {error} |"
    assert load("common").markdown(rows, template) == "| N | share |\n|---|---|\n| 1 | 25% |\n| 2 |  |"
