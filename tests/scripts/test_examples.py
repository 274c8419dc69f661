"""The examples run unchanged from the root of the checkout."""

import json
from importlib.util import find_spec

import pytest
from commands import ROOT, run


EXAMPLES = ROOT / "scripts" / "examples"
EXPECTED = {
    "curve_with_evaluate": "128 99.5% copied",
    "fox_pruned_generation": "2049 tokens were read",
    "hmt_over_a_book": "tokens in 25 segments were read",
    "lora_finetuning": "FoxForCausalLM loaded from",
    "memory_of_a_model": " 32768 tokens need a RoPE base of 630,000",
    "serving": "",
}


def test_each_example_is_here():
    assert {path.stem for path in EXAMPLES.iterdir() if path.is_file()} == {*EXPECTED}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name):
    if name == "serving" and not all(map(find_spec, ("fastapi", "uvicorn", "openai"))):
        pytest.skip("serving needs more packages: pip install 'hf-longctx[serve]'")
    words = [EXAMPLES / f"{name}.py"]
    if name == "memory_of_a_model":
        cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
        words = ["-c", "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")]
    finished = run(["python", *words], cwd=ROOT)
    assert finished.returncode == 0, finished.stderr
    assert EXPECTED[name] in finished.stdout
