"""Run commands and scripts in forks of a process that has imported torch and transformers.

`run([...])` resembles `subprocess.run(capture_output=True, text=True)`, and `Command([...])` resembles `Popen`, for

    ["hf-longctx", ...]    ["python", "-m", MODULE, ...]    ["python", FILE, ...]    ["python", "-c", CODE, ...]

A fork starts in 0.1 s instead of 6 s. It has its own arguments, folder, environment, standard streams, exit
code and signals, and it imports this package again. Libraries are imported already: a test of what an import does, or
of a variable that a library reads as it is imported (TRITON_INTERPRET), needs an interpreter of its own. Of these,
HF_MODULES_CACHE and HF_HUB_OFFLINE are heeded, and those in `HUB` are the same for all processes.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import socket
import sys
import tempfile
from pathlib import Path
from unittest import mock

import interpreter  # noqa: F401 (in this process and in each fork)


ROOT = Path(__file__).resolve().parents[1]
# Libraries only: if the server had imported this package, a command that does not find it would still work.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.nn.modules.linear_cross_entropy",
    "scipy.optimize",
    "scipy.stats",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pandas",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "evaluate",
    "peft",
    "warmed",
]
ADDRESS = socket.socket()  # address of the Hub: the Hub of tests/hub, or an address without a server
HUB = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_XET": "1"}
ENVIRONMENT = {}  # environment of the server; tests do not change it
OUTPUT = ("stdout", "stderr")


def prepare(folder):
    """Choose the variables of the server, whose HF_HOME is in `folder`."""
    ADDRESS.bind(("127.0.0.1", 0))
    HUB.update(HF_ENDPOINT="http://{}:{}".format(*ADDRESS.getsockname()), HF_HOME=os.path.join(folder, "home"))
    ENVIRONMENT.update(os.environ | HUB)


@functools.cache
def start_server():
    """Start the process that commands are forked from."""
    from kernels_library import kernels_library

    multiprocessing.set_forkserver_preload(PRELOADED)
    found = kernels_library(Path(HUB["HF_HOME"]).with_name("libraries")) or []
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(found)}  # later Pythons give it sys.path instead
    with (
        mock.patch.object(sys, "path", [*found, *sys.path]),
        mock.patch.dict(os.environ, environment, clear=True),
    ):
        multiprocessing.forkserver.ensure_running()


def context():
    """Return the context of `multiprocessing` whose processes are forks of the server."""
    start_server()
    return multiprocessing.get_context("forkserver")


def _main(command, folder, streams, environment, package):
    """Become the process of `command`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell ignores Ctrl-C
    gc.freeze()  # garbage collections then skip the objects of the server
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.stdin = os.fdopen(0, closefd=False)
    program, *arguments = map(str, command)
    draw_coarsely()
    option = arguments[0] if program == "python" else None
    libraries = [path for path in sys.path if Path(path).is_relative_to(sys.prefix)]
    libraries += [path for path in sys.path if Path(path).is_relative_to(sys.base_prefix)]
    first = {"-m": os.getcwd(), "-c": "", None: str(ROOT)}.get(option, os.path.dirname(option or ""))
    sys.path = [first, *([str(ROOT)] if package else []), *libraries]
    if cache := os.environ.get("HF_MODULES_CACHE"):
        sys.modules["transformers.dynamic_module_utils"].HF_MODULES_CACHE = cache
    for module in {"huggingface_hub.constants", "datasets.config"} & sys.modules.keys():
        sys.modules[module].HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    try:
        if option is None:
            from hf_longctx.cli import main

            raise SystemExit(main(arguments))
        elif option == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif option == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(option, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def draw_coarsely():
    """Draw figures with few pixels from now on, which saves a quarter of the time. No test looks at them."""
    with contextlib.suppress(ImportError):
        from matplotlib.figure import Figure

        Figure.savefig = functools.partialmethod(Figure.savefig, dpi=40)


class Command:
    """A process that runs a command. At its end, a `with` block kills the process.

    Args:
        command: the program, which is "hf-longctx" or "python", and its arguments.
        cwd: its working directory (default: the caller's).
        env: all of its environment variables (default: the caller's).
        package: let it find hf_longctx.
    """

    def __init__(self, command, *, cwd=None, env=None, package=True):
        self._files = tempfile.TemporaryDirectory()
        streams = [os.path.join(self._files.name, name) for name in ("stdin", *OUTPUT)]
        for path in streams:
            Path(path).touch()
        environment = dict(os.environ if env is None else env)
        arguments = (list(command), str(cwd or os.getcwd()), streams, environment, package)
        self.args, self._process = command, context().Process(target=_main, args=arguments)
        self._process.start()
        self.pid, self.kill, self.terminate = self._process.pid, self._process.kill, self._process.terminate

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.poll() is None:
            self.kill()
            self.wait()

    def poll(self):
        """Return the exit code, which is minus its number where a signal ended the process, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """Return the exit code; raise `TimeoutError` unless the process ends in time."""
        self._process.join(timeout)
        if self.poll() is None:
            raise TimeoutError(f"{self.args} still runs after {timeout} s:\n{self.stdout}\n{self.stderr}")
        return self.poll()

    returncode = property(poll)
    stdout, stderr = (property(lambda self, name=name: Path(self._files.name, name).read_text()) for name in OUTPUT)


def run(command, *, timeout=300, **options) -> Command:
    """Run a command to its end, with the options of `Command`. The result has `returncode`, `stdout` and `stderr`."""
    with Command(command, **options) as done:
        done.wait(timeout)
    return done
