"""The distributions for the package index: their files, and the links in their description."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as file:
        yield file


@pytest.mark.parametrize("source", ["", "https://github.com/alice/hf-longctx"])
def test_links_of_the_description_are_absolute_or_left_out(source, tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(ROOT)
    from hatch_build import CustomMetadataHook

    (tmp_path / "hf_longctx" / "hub").mkdir(parents=True)
    (tmp_path / "hf_longctx" / "hub" / "card.py").write_text(f'SOURCE = "{source}"\n')
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(readme)
    metadata = {}
    CustomMetadataHook(str(tmp_path), {}).update(metadata)
    text = metadata["readme"]["text"]
    links = ["".join(link) for link in re.findall(r'\]\(([^)]*)|src="([^"]*)', text)]
    assert all(link.startswith("https://") for link in links) and bool(metadata["urls"]) == bool(source)
    if source:
        assert len(links) == len(re.findall(r'\]\(|src="', readme)) > 20
        for kind, path in re.findall(rf"{re.escape(source)}/(\w+)/main/([^)#\"]+)", text):
            assert (ROOT / path).exists() and kind == ("raw" if path.endswith(".png") else "blob")


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(["git", "ls-files", "hf_longctx"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert set(tracked.stdout.split()) <= names and "hf_longctx/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"hf_longctx"}
