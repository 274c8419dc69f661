"""scripts/release names everything that a release lacks."""

import subprocess

import pytest
from commands import ROOT

from scripts.release import missing


FILES = {
    "hf_longctx/__init__.py": '__version__ = "0.2.0"\n',
    "hf_longctx/hub/card.py": 'SOURCE = "https://github.com/somebody/hf-longctx"\n',
    "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2027-01-31)\n\n## 0.1.0 (2026-12-01)\n",
    "model_cards/fox-demo/README.md": "Ask at https://github.com/somebody/hf-longctx.\n",
}
CHANGES = [  # a file, its new content, and a part of the message
    (None, None, None),
    ("CHANGELOG.md", "## Unreleased: 0.2.0\n", 'must be "0.2.0 (YYYY-MM-DD)", got "Unreleased: 0.2.0"'),
    ("CHANGELOG.md", "## 0.1.0 (2026-12-01)\n", 'got "0.1.0 '),
    ("hf_longctx/hub/card.py", 'SOURCE = ""\n', "must be the address of the repository"),
    ("model_cards/fox-demo/README.md", "A card.\n", "does not name https://github.com/somebody"),
    ("README.md", "Load hf-longctx/fox-demo.\n", "README.md names the placeholder"),
    ("new", None, "not committed"),
    ("v0.2.0", None, "The tag v0.2.0 exists"),
]


@pytest.mark.parametrize("name, content, expected", CHANGES, ids=lambda value: str(value)[:20])
def test_what_is_missing_is_named(name, content, expected, tmp_path):
    files = FILES | ({name: content} if content else {})
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "[docs] Add files"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    if name == "new":
        (tmp_path / name).touch()
    if name == "v0.2.0":
        subprocess.run(["git", "tag", name], cwd=tmp_path, check=True)
    found = list(missing(tmp_path))
    assert len(found) == (1 if expected else 0), found
    assert expected is None or expected in found[0]


def test_this_repository_can_be_checked():
    assert all(sentence.endswith(".") for sentence in missing(ROOT))
