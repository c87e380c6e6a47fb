"""Python processes that start with the libraries loaded, for tests that need many processes.

    test ──command, environment, descriptors──▶ server: torch, transformers, nopad are loaded
                                                  └─fork─▶ keeper ─fork─▶ the process
         ◀──────────── pid, and in the end the exit code ────┘

The workers of a run of pytest-xdist share a server. Loading takes seconds, the work of a test often
less. `run` and `Popen` are those of `subprocess` for `[sys.executable, *command]` and text:
processes with their own environment, folder, signals and exit codes. They see no GPU. What the
first import of nopad does is seen with `loaded=LIBRARIES`. Imports have read TRITON_INTERPRET as
given, and all else of the environment as it is for the test.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from select import select
from types import ModuleType

import numpy

LIBRARIES = ("torch._dynamo", "transformers.modeling_utils")  # dynamo: for optimizer steps
EVERYTHING = (
    *LIBRARIES,
    "accelerate.utils",
    "transformers.models.llama.modeling_llama",
    "nopad.inference",
    "nopad.trainer.with_accelerate",
    "nopad.trainer.with_hf",
    "nopad.trainer.with_lightning",
)


def run(
    command, *, input: str = "", timeout: float | None = None, **settings
) -> subprocess.CompletedProcess:
    """Start, wait, and return what it wrote and how it ended."""
    reading, writing = os.pipe()
    os.write(writing, input.encode())
    os.close(writing)
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = Popen(command, stdin=reading, **{**outputs, **settings})
    os.close(reading)
    try:
        out, err = child.communicate(timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


class Popen:
    """`subprocess.Popen([sys.executable, *command], text=True)`, from the server."""

    def __init__(
        self,
        command,
        *,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        loaded: tuple[str, ...] = EVERYTHING,
    ):
        self.args, self.returncode = [os.fspath(part) for part in command], None
        self.stdout, out = _stream(stdout, 1)
        self.stderr, err = _stream(stderr, 2)
        self._keeper, reply = socket.socketpair()
        descriptors = [_stream(stdin, 0)[1], out, err, reply.detach()]
        request = {
            "args": self.args,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        interpret = request["env"].get("TRITON_INTERPRET")
        message, server = json.dumps(request).encode(), _server(loaded, interpret)
        socket.send_fds(server, [len(message).to_bytes(8)], descriptors)
        server.sendall(message)
        for descriptor in descriptors:
            os.close(descriptor)
        self.pid = self._number()

    def _number(self) -> int:
        message = self._keeper.recv(8)
        assert message, "the server of processes, or this one's keeper, died"
        return int.from_bytes(message, signed=True)

    def poll(self) -> int | None:
        if self.returncode is None and select([self._keeper], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select([self._keeper], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._number()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read what it writes until it ends."""
        said = ["", ""]

        def read(place: int, stream) -> None:
            said[place] = stream.read()

        streams = [(n, s) for n, s in enumerate((self.stdout, self.stderr)) if s is not None]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _stream(wanted: int | None, own: int):
    """Return what the test reads, if anything, and the descriptor that the process gets."""
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if wanted != subprocess.PIPE:
        return None, os.dup(own if wanted is None else wanted)
    reading, writing = os.pipe()
    return os.fdopen(reading), writing


@functools.cache
def _server(loaded: tuple[str, ...], interpret: str | None) -> socket.socket:
    """Connect to the server; start it if no worker has. It ends when the last one does."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    address = f"\0nopad-{run}-{len(loaded)}-{interpret}"
    control, listener = (socket.socket(socket.AF_UNIX) for _ in range(2))
    try:
        listener.bind(address)
    except OSError:  # another worker has started it
        listener.close()
    else:
        _start(listener, loaded, interpret)
    for _ in range(500):
        with suppress(ConnectionRefusedError):  # bound, and not listening yet
            control.connect(address)
            break
        time.sleep(0.01)
    atexit.register(control.close)
    return control


def _start(listener: socket.socket, loaded: tuple[str, ...], interpret: str | None) -> None:
    listener.listen()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)
    if interpret is not None:
        env["TRITON_INTERPRET"] = interpret  # read by imports
    command = [sys.executable, __file__, str(listener.fileno()), *loaded]
    server = subprocess.Popen(command, env=env, pass_fds=[listener.fileno()])
    listener.close()

    def stop() -> None:
        with suppress(subprocess.TimeoutExpired):  # if other workers are not done
            server.wait(1)

    atexit.register(stop)


def serve(listener: socket.socket) -> list[str] | None:
    """Fork a process for every request. Return its command in it, and None in the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    controls = [listener.accept()[0]]
    while controls:
        for ready in select([listener, *controls], [], [])[0]:
            if ready is listener:
                controls.append(listener.accept()[0])
                continue
            header, descriptors, *_ = socket.recv_fds(ready, 8, 4)
            if not header:
                controls.remove(ready)
                continue
            request = ready.recv(int.from_bytes(header), socket.MSG_WAITALL)
            if not os.fork():
                for own in (listener, *controls):
                    own.close()
                return _keep(json.loads(request), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    return None


def _keep(request: dict, *descriptors: int) -> list[str]:
    """Fork the process and tell how it ended. Return its command in it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, reply = descriptors
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError), socket.socket(fileno=reply) as test:
            test.send(pid.to_bytes(8, signed=True))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            test.send(code.to_bytes(8, signed=True))
        os._exit(0)
    os.close(reply)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    # The old objects remember whether their files could seek.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return request["args"]


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def execute(command: list[str]) -> int:
    """Run a script, `-c CODE` or `-m MODULE` as Python does, and return the exit code."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    code = 1
    try:
        _execute(command, main)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    main.__dict__.clear()
    threading._shutdown()
    return code


def _execute(command: list[str], main: ModuleType) -> None:
    random.seed()
    numpy.random.seed()
    first, *rest = command
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        source, sys.argv, sys.path[0] = rest[0], ["-c", *rest[1:]], ""
        first = "<string>"
    else:
        source, sys.argv = Path(first).read_text(), command
        main.__file__, sys.path[0] = first, str(Path(first).resolve().parent)
    exec(compile(source, first, "exec"), main.__dict__)


def preload(names: list[str]) -> None:
    """Import what the processes need, and freeze it: forks share what no collection looks at.

    Helper modules are found as in the tests.
    """
    sys.path += map(str, sorted(Path(__file__).parents[1].rglob("support")))
    for name in names:
        with suppress(ImportError):  # of an extra
            import_module(name)
    if "nopad.inference" in names:
        from nopad.packing import PackedDataset

        list(PackedDataset([[1, 2, 3], [4, 5]] * 9, budget=8))  # what numba compiles or loads
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    preload(sys.argv[2:])
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    status = 0
    if wanted is not None:
        status = execute(wanted)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    os._exit(status)  # to take all the modules down costs a second
