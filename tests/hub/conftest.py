"""A Hub on this machine, and clients of it in processes of their own, which may lack this package."""

import os
import shutil
from pathlib import Path

import commands
import pytest


CLIENTS = Path(__file__).parent / "clients"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    for name in ("starlette", "uvicorn", "python_multipart"):
        pytest.importorskip(name, reason=f"the local Hub needs {name}: pip install 'hf-longctx[dev]'")
    from server import serve

    with serve(tmp_path_factory.mktemp("blobs"), commands.ADDRESS) as hub:
        yield hub


@pytest.fixture
def hub(server):
    """The running `Hub`, empty. A test fails if something happened that must never happen; see `Hub.problems`."""
    server.log.clear()
    server.repos.clear()
    server.knobs = type(server.knobs)()
    yield server
    assert not server.problems(), "\n".join(server.problems())


@pytest.fixture
def publish(hub):
    """Puts {path: content or file} onto the hub, as it is: `publish(files, id)` gives the commit."""
    from server.repos import GITATTRIBUTES, File, Repo

    def publish(files, id, private=False, type="model", branch="main"):
        rows = {".gitattributes": File.of(GITATTRIBUTES, hub.put(GITATTRIBUTES))}
        for path, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            sha256 = hub.put(data)
            rows[path] = File.pointer(sha256, len(data)) if path.endswith(".safetensors") else File.of(data, sha256)
        repo = hub.repos.setdefault((type, id), Repo(type, id, private, "gradio" if type == "space" else None))
        return repo.commit(branch, rows, "by a test")

    return publish


@pytest.fixture
def run_client(hub, tmp_path):
    """Runs a file of clients/ and gives what it printed; it fails if the file does.

    Its environment has the address of the hub, a token of alice, and an empty cache that calls of one test share.
    """
    shutil.rmtree(commands.HUB["HF_HOME"], ignore_errors=True)

    def run(name, *arguments, package=False, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= commands.HUB | {"HF_TOKEN": "hf_of_alice"} | variables
        environment |= {"DISABLE_SAFETENSORS_CONVERSION": "1"}  # which would ask a Space of huggingface.co
        command, requests = ["python", CLIENTS / name, *arguments], len(hub.log)
        done = commands.run(command, cwd=tmp_path, env=environment, package=package, timeout=400)
        assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
        assert "HF_HUB_OFFLINE" not in variables or len(hub.log) == requests, "a request was sent offline"
        assert "hf_of_" not in done.stdout + done.stderr, "a token was printed"
        return done.stdout

    return run
