"""The READMEs show what happens: their Python is run and its output compared, their commands are run."""

import contextlib
import io
import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import run
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import cli, corpus
from hf_longctx.metrics import Result, Task


ROOT = Path(__file__).resolve().parents[1]
# tests/hub/test_cards.py tests the cards, which load from the Hub.
FOLDERS = ("hf_longctx", "model_cards", "scripts")
READMES = sorted({*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).glob("**/README.md"))})
READMES = [path for path in READMES if "modules" not in path.parts and not path.with_name("config.json").exists()]
IDS = [str(path.relative_to(ROOT)) for path in READMES]


def blocks(path):
    """(language, text) of every code block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(path):
    return [line for language, text in blocks(path) if language == "bash" for line in text.splitlines()]


@pytest.fixture(scope="module")
def small_cards(tmp_path_factory):
    """Return a copy of model_cards in which a FoX with one layer replaces the trained one."""
    folder = tmp_path_factory.mktemp("model_cards")
    for path in (ROOT / "model_cards").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "fox-demo").unlink()
    shutil.copytree(ROOT / "model_cards" / "fox-demo", folder / "fox-demo")
    config = AutoConfig.from_pretrained(folder / "fox-demo", num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "fox-demo")
    return folder


@pytest.fixture
def short_text(monkeypatch):
    """Cut the text of `stdlib`, to save the time of tokenizing it."""
    text = corpus.stdlib_text
    monkeypatch.setattr(corpus, "stdlib_text", lambda part: text(part)[:20_000])


with_python = [path for path in READMES if any(language == "python" for language, _ in blocks(path))]


@pytest.mark.usefixtures("short_text", "short_replies", "undrawn")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # from PEFT
@pytest.mark.parametrize("readme", with_python, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_prints_what_the_readme_says(readme, monkeypatch, tmp_path):
    """A block without an output below it is shown and run, too."""
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Task, "tasks", dict(Task.tasks))  # a metric that a README defines is forgotten afterwards
    monkeypatch.setattr(Result, "kinds", dict(Result.kinds))
    shown, names = [*blocks(readme), ("", "")], {}
    for (language, code), (following, output) in itertools.pairwise(shown):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == (output if following == "text" else "")


@pytest.mark.usefixtures("short_text", "short_replies", "undrawn")
@pytest.mark.parametrize(
    "command",
    dict.fromkeys(x for path in READMES for x in commands(path) if x.startswith("hf-longctx ")),
)
def test_commands_work(command, small_cards, tmp_path, monkeypatch):
    (tmp_path / "model_cards").symlink_to(small_cards)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command, comments=True)[1:]) == 0


def test_demo(tmp_path):
    """scripts/demo without its environment, which the one that runs this test replaces."""
    assert {"scripts/demo", "scripts/test"} <= set(commands(ROOT / "README.md"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"In line {i} the {i * i % 97} foxes of {i % 13} villages met. " for i in range(30)))
    done = run(["python", ROOT / "scripts" / "demo.py", text, "--max-length", "24", "--output", tmp_path / "out"])
    assert done.returncode == 0, done.stderr
    figures = re.findall(r"^Forget.+: +(/.+)$", done.stdout, re.MULTILINE)
    assert len(figures) == 2 and all(Path(path).is_file() for path in figures)
    models = "FoX (Pro)", "Transformer (Pro)", "Llama"
    assert all(f"| {name} | order |" in done.stdout for name in models) and "Different: " not in done.stdout
    assert "decay times of 40 heads: " in done.stdout


@pytest.mark.parametrize("readme", READMES, ids=IDS)
def test_links_lead_somewhere(readme):
    text = readme.read_text()
    links = ["".join(link) for link in re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", text)]
    broken = [link for link in links if not link.startswith("http") and not (readme.parent / link).exists()]
    assert not broken, f"{readme.name} points to {broken}"
