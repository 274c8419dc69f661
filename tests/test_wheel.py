"""What is built for the package index: its files, and a description whose links lead somewhere from there."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
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


def test_links_of_the_description_are_absolute(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    source, owner = urls["Source"], urls["Models"].rpartition("/")[2]
    assert (
        source.startswith(f"https://github.com/{owner}/") and urls["Changelog"] == f"{source}/blob/main/CHANGELOG.md"
    )
    named = ["git", "grep", "-l", re.escape(source)]
    files = subprocess.run(named, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert [name for name in files if not name.startswith("model_cards/")] == ["hf_longctx/hub/card.py"]
    text, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r'\]\(([^)]*)|src="([^"]*)', text)
    assert len(links) == len(re.findall(r'\]\(([^)]*)|src="([^"]*)', readme)) > 20
    assert all("".join(link).startswith("https://") for link in links)
    for kind, path in re.findall(rf"{re.escape(source)}/(\w+)/main/([^)#\"]+)", text):
        assert (ROOT / path).exists() and kind == ("raw" if path.endswith(".png") else "blob")


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(["git", "ls-files", "hf_longctx"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert set(tracked.stdout.split()) <= names and "hf_longctx/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"hf_longctx"}
