"""What a saved file holds beside the result."""

import json
import subprocess
from datetime import datetime, timezone

import pytest

from hf_longctx.metrics import ForgettingCurve
from hf_longctx.metrics.result import commit_of, save_document


def git(folder, *arguments):
    identity = ["-c", "user.name=Fox", "-c", "user.email=fox@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_a_saved_result_has_its_time_and_reads_the_same(tmp_path):
    curve = ForgettingCurve([], {"seed": 3})
    before = datetime.now(timezone.utc).replace(microsecond=0)
    curve.save(tmp_path / "curve.json")
    document = json.loads((tmp_path / "curve.json").read_text())
    assert before <= datetime.fromisoformat(document["saved"]["time"]) <= datetime.now(timezone.utc)
    assert "saved" not in curve.to_json()
    assert ForgettingCurve.from_json((tmp_path / "curve.json").read_text()) == curve
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    save_document(tmp_path / "a.json", '{"x": 1}')
    with pytest.raises(ValueError, match="JSON"):
        save_document(tmp_path / "a.json", '{"x": NaN}')
    assert json.loads((tmp_path / "a.json").read_text())["x"] == 1


def test_the_commit_is_that_of_a_checkout(tmp_path):
    (tmp_path / "file").write_text("one")
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = commit_of(tmp_path)
    assert len(commit) == 40 and int(commit, 16)
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") is None
