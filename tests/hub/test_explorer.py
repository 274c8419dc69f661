"""The Space "How far does it remember?": its files, what it refuses to read, and visitors with a browser."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from mistakes import refused

from hf_longctx import cli
from hf_longctx.hub import build_bundle, build_explorer, build_space
from hf_longctx.hub.explorer_space import APP


ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "model_cards" / "fox-demo"
MAMBA = ROOT / "model_cards" / "evidence" / "curves" / "mamba_2.json"
WITH_SDK = {"gradio", "PIL"}
BEHIND = {"tokenizers"}  # by transformers


def content(file):
    return file if isinstance(file, bytes) else file.read_bytes()


def pins(text):
    return dict(line.split("==") for line in text.splitlines() if "==" in line)


def test_the_space_is_closed():
    """What its files import is in the Space, in its requirements, or comes with gradio."""
    files = build_explorer().files
    modules = {re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".") for path in files if path.endswith(".py")}
    libraries = {name.replace("-", "_") for name in pins((APP / "requirements.txt").read_text())}
    for path in files:
        tree = ast.parse(content(files[path])) if path.endswith(".py") else ast.Module([])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("hf_longctx")):
                parents = path.split("/")[: -node.level] if node.level else []
                module = ".".join(parents + ([node.module] if node.module else []))
                assert module in modules, f"{path} needs {module}"
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            strangers = {name.split(".")[0] for name in names} - modules - libraries - sys.stdlib_module_names
            assert strangers <= WITH_SDK | BEHIND, f"{path} needs {strangers}"


def test_versions_are_pinned_to_those_that_are_tested():
    constraints = pins((ROOT / "scripts" / "constraints.txt").read_text())
    for bundle in (build_explorer(), build_space("forgetting_curve")):
        for name, version in pins(content(bundle.files["requirements.txt"]).decode()).items():
            assert version.removesuffix("+cpu") == constraints[name], name


def test_the_card_says_how_to_run_it():
    card = yaml.safe_load((APP / "README.md").read_text().split("---")[1])
    assert card["sdk"] == "gradio" and re.fullmatch(r"\d+\.\d+\.\d+", card["sdk_version"])
    assert card["python_version"] == "3.11" and card["license"] == "apache-2.0"
    assert (APP / card["app_file"]).is_file() and len(card["short_description"]) <= 60


def test_a_dry_run_needs_no_hub(capsys):
    assert cli.main(["push-space", "alice/how-far", "--dry-run", "--examples", str(DEMO), str(MAMBA)]) == 0
    text = capsys.readouterr().out
    names = "app.py examples/fox-demo.json examples/fox-demo/model.safetensors examples/mamba_2.json hf_longctx/fox/"
    assert all(name in text for name in names.split())


def examples(*names, **contents):
    """A mistake: examples of these names, in a folder with files of these contents."""

    def mistake(folder):
        for name, text in contents.items():
            (folder / f"{name}.json").write_text(text)
        build_explorer([folder / name for name in names])

    return mistake


def with_link(folder):
    (folder / "forgetting_curve.json").symlink_to(MAMBA)
    build_explorer([folder])


def twice(folder):
    shutil.copyfile(MAMBA, folder / "fox-demo.json")
    build_explorer([folder / "fox-demo.json", DEMO])


def without_tokenizer(folder):
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DEMO / name, folder / name)
    build_explorer([folder])


def reading(text):
    def mistake(folder):
        import inputs

        inputs.read_config(text)

    return mistake


MISTAKES = [
    refused("an example that is no result", examples("x.json", x="{}"), "is not a result file"),
    refused("an example that is absent", examples("y.json"), "No such file"),
    refused("a folder of nothing", examples("."), "lacks forgetting_curve.json, and is not a FoX"),
    refused("a link out", with_link, "a link that leads out"),
    refused("two of one name", twice, "two examples are called fox-demo"),
    refused("a model without a tokenizer", without_tokenizer, "tokenizer.json is absent"),
    refused("a list", reading("[1]"), "must hold a JSON object, not a list"),
    refused("no JSON", reading("{x"), "config.json is not JSON: Expecting property name"),
    refused("a billion layers", reading('{"num_hidden_layers": 1000000000}'), "num_hidden_layers is 1000000000"),
    refused("a billion labels", reading('{"text_config": {"num_labels": 1000000000}}'), "up to 1,024 there"),
    refused("a wide head", reading('{"head_dim": 1000000}'), "head_dim is 1000000; this Space reads numbers up to"),
    refused("many heads in a list", reading('{"num_heads": [[4, 1000000]]}'), "num_heads is 1000000"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes(mistake, tmp_path, record_property, monkeypatch):
    monkeypatch.syspath_prepend(APP)
    record_property("mistake", mistake.check(tmp_path))


# -- in a browser


@pytest.fixture
def page():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="it drives the browser: pip install 'hf-longctx[space]'"
    )
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        playwright.expect.set_options(timeout=60_000)
        yield page
        browser.close()


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """An interpreter with the installed libraries and without hf_longctx, even where it is installed for editing."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    packages = next(folder.glob("lib/python*/site-packages"), folder / "Lib" / "site-packages")
    (packages / "libraries.pth").write_text("\n".join(libraries))  # .pth files in these folders are not read
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


@pytest.fixture
def address(hub, publish, bare_python, tmp_path):
    """Of the Space, which runs in a process of its own, with the local Hub and without the package but its copy."""
    pytest.importorskip("gradio", reason="the Space is made with it: pip install 'hf-longctx[space]'")
    publish(build_bundle(DEMO).files, "alice/fox")
    publish({"config.json": b'{"model_type": "llama", "rope_parameters": 3}'}, "mallory/rope")
    for path, file in build_explorer([DEMO, MAMBA]).files.items():
        (tmp_path / "space" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "space" / path).write_bytes(content(file))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [bare_python, "-u", "app.py"]
    with subprocess.Popen(command, cwd=tmp_path / "space", env=environment, stdout=subprocess.PIPE, text=True) as app:
        try:
            yield next(line.split()[-1] for line in app.stdout if "local URL" in line)
        finally:
            app.terminate()


def test_a_visitor(page, address, hub, tmp_path):
    from playwright.sync_api import expect

    outside = []
    page.on("request", lambda request: outside.append(request.url) if address not in request.url else None)

    def click(name):
        page.get_by_role("button", name=name).click()

    def see(text):
        """The text, without anything wider than the window of a telephone or of a desktop."""
        expect(page.get_by_text(text).locator("visible=true").first).to_be_visible()
        page.wait_for_function("[...document.images].every(image => image.complete)")
        name = re.sub(r"\W+", "_", text)
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, text
            page.screenshot(path=tmp_path / f"{name}_{width}.png", full_page=True)

    page.goto(address)
    see("violated at 4096 tokens")
    page.get_by_label("Base (rope_theta)").fill("500000")
    click("Check these numbers")
    see("holds at 4096 tokens")
    page.get_by_label("Scaling").click()
    page.get_by_role("option", name="yarn").click()
    expect(page.get_by_label("Factor")).to_be_visible()

    page.get_by_role("tab", name="By configuration").click()
    config = {"max_position_embeddings": 4096, "rope_theta": 10_000.0, "num_hidden_layers": 2, "head_dim": 64}
    page.get_by_label("or config.json").fill(json.dumps(config))
    click("Check this configuration")
    see("2 full_attention")
    page.get_by_label("or config.json").fill("")
    page.get_by_label("Name on the Hub").fill("mallory/rope")
    click("Check this configuration")
    see("cannot make a configuration")
    page.get_by_label("Name on the Hub").fill("alice/fox")
    click("Check this configuration")
    see("FoxConfig has no rotary position embedding")

    page.get_by_role("tab", name="Forgetting curves").click()
    curve = json.loads(MAMBA.read_text())
    curve["settings"]["model"] = """<img src=x onerror="document.title='ran'">"""
    (tmp_path / "mine.json").write_text(json.dumps(curve))
    page.locator("input[type=file]").set_input_files(tmp_path / "mine.json")
    expect(page.get_by_text("mine.json").first).to_be_visible()
    click("Compare")
    see("effective (85 % copied)")
    cut = "[...document.querySelectorAll('table')].filter(x => x.scrollWidth > x.clientWidth).length"
    assert page.evaluate(cut) == 0, "a column is cut"
    page.get_by_role("button", name="For the model card of fox-demo").click()
    see("model-index")
    expect(page.locator('img[src="x"]')).to_have_count(0)
    assert page.title() == "How far does it remember?"

    page.get_by_role("tab", name="Gates").click()
    click("Show the gates")
    see("layer 3")
    page.get_by_label("or a FoX on the Hub").fill("alice/none")
    click("Show the gates")
    see("there is no model alice/none on the Hub")
    expect(page.get_by_text("layer 3")).to_have_count(0)
    page.get_by_label("or a FoX on the Hub").fill("alice/fox")
    click("Show the gates")
    see("layer 3")
    assert not outside, outside
    assert not [entry.path for entry in hub.log if entry.path.endswith(".py")], "code was fetched"
    assert [entry.path for entry in hub.log if "model.safetensors" in entry.path]
