"""A Hub on this machine, and clients of it in processes of their own, which may lack this package."""

import os
import shutil
from pathlib import Path

import commands
import pytest


CLIENTS = Path(__file__).parent / "clients"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    for name in ("starlette", "uvicorn"):
        pytest.importorskip(name, reason=f"the local Hub needs {name}: pip install 'hf-longctx[dev]'")
    from server import serve

    with serve(tmp_path_factory.mktemp("blobs"), commands.ADDRESS) as hub:
        yield hub


@pytest.fixture
def hub(server):
    """The running `Hub`, empty. A test fails if the server has noticed `problems`."""
    for kept in (server.log, server.problems, server.repos):
        kept.clear()
    server.knobs = type(server.knobs)()
    yield server
    assert not server.problems, "\n".join(server.problems)


@pytest.fixture
def publish(hub):
    """Return a function that commits {path: content or file} to the Hub without checks, and returns the commit."""
    from server import Repo

    def publish(files, id, private=False, type="model", branch="main"):
        contents = {path: x if isinstance(x, bytes) else x.read_bytes() for path, x in files.items()}
        repo = hub.repos.setdefault((type, id), Repo(type, id, private))
        return repo.commit(branch, {path: hub.store(content) for path, content in contents.items()}, "by a test")

    return publish


@pytest.fixture
def run_client(hub, tmp_path):
    """Return a function that runs a file of clients/ and returns its output. If the file fails, the test fails.

    Its environment has the address of the Hub, alice's token, and an empty cache that the calls of a test share.
    """
    shutil.rmtree(commands.HUB["HF_HOME"], ignore_errors=True)

    def run(name, *arguments, package=False, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= commands.HUB | {"HF_TOKEN": "hf_of_alice"} | variables
        environment |= {
            "DISABLE_SAFETENSORS_CONVERSION": "1"
        }  # the conversion would send requests to a Space of huggingface.co
        command, requests = ["python", CLIENTS / name, *arguments], len(hub.log)
        done = commands.run(command, cwd=tmp_path, env=environment, package=package, timeout=400)
        assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
        assert "HF_HUB_OFFLINE" not in variables or len(hub.log) == requests, "a request was sent offline"
        assert "hf_of_" not in done.stdout + done.stderr, "a token was printed"
        return done.stdout

    return run
