"""Forked commands are what new processes would be: streams, exit codes, signals, environment, folder, imports."""

import os
import signal
import sys
import time

import pytest
from commands import PRELOADED, Command, run

from hf_longctx import __version__


def test_a_command_and_its_exit_code():
    assert run(["hf-longctx", "--version"]).stdout == f"hf-longctx {__version__}\n"
    refused = run(["hf-longctx", "curve"])
    assert refused.returncode == 2 and "required" in refused.stderr and not refused.stdout


def test_a_script_has_its_own_surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("FOR_THE_SESSION", "1")
    code = (
        "import os, sys; print(sys.argv, os.getcwd(), dict(os.environ), input(), __name__, sys.path[0]); sys.exit(3)"
    )
    (tmp_path / "script.py").write_text(code)
    for program, path in ([tmp_path / "script.py"], tmp_path), (["-c", code], ""), (["-m", "script"], tmp_path):
        done = run(["python", *program, "x y"], cwd=tmp_path, env={"A": "b"}, input="typed\n")
        first = "-c" if program[0] == "-c" else str(tmp_path / "script.py")
        assert done.stdout == f"{[first, 'x y']} {tmp_path} { {'A': 'b'} } typed __main__ {path}\n"
        assert done.returncode == 3 and not done.stderr
    assert "'FOR_THE_SESSION': '1'" in run(["python", "-c", code], input="\n").stdout


def test_an_error_and_what_is_done_at_exit():
    done = run(["python", "-c", "import atexit; atexit.register(print, 'bye'); print('hello'); 1 / 0"])
    assert done.returncode == 1 and done.stdout.split() == ["hello", "bye"] and "ZeroDivisionError" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(number):
    with Command(["python", "-c", "import time; print('ready', flush=True); time.sleep(99)"]) as command:
        while "ready" not in command.stdout:
            time.sleep(0.01)
        assert command.poll() is None
        os.kill(command.pid, number)
        assert command.wait(10) == -number
    with Command(["python", "-c", "import time; time.sleep(99)"]) as command, pytest.raises(TimeoutError):
        command.wait(0.01)
    assert command.returncode == -signal.SIGKILL


def test_without_the_package(tmp_path):
    done = run(["python", "-c", "import hf_longctx"], cwd=tmp_path, package=False)
    assert done.returncode == 1 and "No module named 'hf_longctx'" in done.stderr


def test_libraries_are_imported_already_and_this_package_is_not():
    code = "import sys; print([n for n in sys.argv[1:] if n in sys.modules], 'hf_longctx' in sys.modules)"
    needed = ["torch", "transformers.trainer"]
    assert set(needed) <= set(PRELOADED)
    assert run(["python", "-c", code, *needed]).stdout == f"{needed} False\n"
