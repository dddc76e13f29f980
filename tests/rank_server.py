"""Starts launches from a process that has imported what they import, in place of an interpreter for each of their processes.

The server imports torch, accelerate, DeepSpeed and the recipes once, and does nothing else. For a launch it forks a launcher,
which runs accelerate's own ``main`` on the command line; where that starts an interpreter for a script, the server's copy of
the launch forks one instead. So accelerate computes the environment, and torch's elastic agent starts, watches, restarts and
ends the ranks, as for every user.

    pytest ── server ── launcher (accelerate launch ...)
                           ├── spawner: forked before the launcher had threads
                           ├── rank 0 (python -u script ...)
                           └── rank 1

A rank is forked by the spawner and adopted by the launcher, so its parent is the launcher, which can wait for it. Command
lines and environments in /proc are those that the processes would have. A forked process differs from a started one in this:

- Variables that libraries read at their import have the server's values; `tests.rank_client.Server.fits` checks that.
- What libraries print at their import is not in its output.
- All processes of a session hash strings with one seed. Started ranks differ in the order of sets.
- Its interpreter is not torn down at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
FILLER = "ZEROBOOK_FILLER"
ROOM = {"arg": 8_000, "env": 40_000}
"""Bytes that a process's command line and its environment may have."""
MODULES = (
    "accelerate.commands.launch", "bitsandbytes", "datasets", "deepspeed", "peft",
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft.tuners.lora.bnb", "peft.utils.transformers_weight_conversion",
    "torch.distributed.run", "torch.utils.cpp_extension", "transformers.conversion_mapping",
    "transformers.integrations.bitsandbytes", "transformers.optimization", "transformers.trainer_pt_utils", "webbrowser",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bart", "blenderbot", "gpt2", "llama", "mixtral", "t5")),
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36


class Process:
    """A forked process, waited for as a `subprocess.Popen` is."""

    def __init__(self, args: Sequence[str], pid: int):
        self.args = list(args)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        raise NotImplementedError


class Child(Process):
    """A rank, seen by its launcher, whose child it is."""

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            watch = os.pidfd_open(self.pid)
            try:
                if select.select([watch], [], [], timeout)[0]:
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            finally:
                os.close(watch)
        return self.returncode


def send(to: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send a message with copies of open files."""
    socket.send_fds(to, [pickle.dumps(message)], list(files))


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its files; an empty one where the other end is closed."""
    data, files, _, _ = socket.recv_fds(source, 1 << 20, 8)
    return (pickle.loads(data) if data else {}), list(files)


def ignored_signals() -> list[int]:
    """Return the signals that this process ignores, without those that every Python process does."""
    own = {signal.SIGPIPE, signal.SIGXFSZ}
    return [number for number in signal.valid_signals() - own if signal.getsignal(number) == signal.SIG_IGN]


def serve(files: int) -> NoReturn:
    """Import, then fork what is asked for, until the other end is closed."""
    orders = socket.socket(fileno=files)
    message, _ = receive(orders)
    os.environ.clear()
    os.environ.update(message["environment"])
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # Arrow's allocator starts a thread otherwise
    preload()
    del os.environ["JE_ARROW_MALLOC_CONF"]
    send(orders, {"environment": dict(os.environ.items())})
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, where its exit status is told)
    while True:
        for ready in select.select([orders, *running], [], [])[0]:
            if ready is not orders:
                pid, told = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, struct.pack("i", code))
                os.close(ready)
                os.close(told)
                continue
            order, given = receive(orders)
            if not order:
                os._exit(0)
            check_alone()
            pid = os.fork()
            if not pid:
                stdin, stdout, stderr, _ = given
                become(order, [stdin, stdout, stderr])
                script(order["line"]) if script_of(order["line"]) else launcher(order["line"])
            running[os.pidfd_open(pid)] = pid, given.pop()
            for file in given:
                os.close(file)
            send(orders, {"pid": pid})


def preload() -> None:
    """Import what launchers and ranks import."""
    import importlib

    for name in MODULES:
        importlib.import_module(name)
    # transformers makes a large table at its first use, at each start of a rank otherwise.
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    for file in sorted((ROOT / "recipes").glob("*.py")):
        importlib.import_module(f"recipes.{file.stem}")
    for file in sorted((ROOT / "zerobook").rglob("*.py")):
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("recipes", "tests")]:
        del sys.modules[name]  # a launched process has them only where it imports them
    gc.collect()
    gc.freeze()


def check_alone() -> None:
    """Raise `RuntimeError` where this process has threads: a fork would not have them, and could wait for their locks."""
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(names) > 1:
        raise RuntimeError(f"the server has {len(names)} threads: {', '.join(names)}. An import has started them")


def become(order: Mapping[str, Any], files: Sequence[int]) -> None:
    """Give this forked process its files, directory, variables, signals and random numbers."""
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.closerange(3, 4096)
    if order.get("session"):
        os.setsid()
    if order.get("cwd"):
        os.chdir(order["cwd"])
    for number in order["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number in set(ignored_signals()) - set(order["ignored"]):
        # Where SIGINT is not ignored, a Python process that starts handles it.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    write_over("arg", [order["line"][0], *words_of_size("-X", order["line"]), *order["line"][1:]])
    pairs = [f"{key}={value}" for key, value in order["environment"].items()]
    write_over("env", [*pairs, filler(f"{FILLER}=", size_of("env") - sum(len(os.fsencode(pair)) + 1 for pair in pairs))])
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def words_of_size(option: str, line: Sequence[str]) -> list[str]:
    """Return an option of Python that fills the room for a command line, beside ``line``."""
    taken = sum(len(os.fsencode(word)) + 1 for word in (option, *line))
    return [option, filler("", size_of("arg") - taken)]


def filler(start: str, size: int) -> str:
    """Return a word of ``size`` bytes, its end included."""
    if size < len(start) + 1:
        raise RuntimeError(f"a command line or environment is longer than {ROOM} bytes, the room that a forked process has")
    return start.ljust(size - 1, "x")


def place_of(area: str) -> tuple[int, int]:
    """Return the addresses between which Linux looks for this process's command line (``arg``) or environment (``env``)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = {"arg": 45, "env": 47}[area]
    return int(fields[first]), int(fields[first + 1])


def size_of(area: str) -> int:
    start, end = place_of(area)
    return end - start


def write_over(area: str, words: Sequence[str]) -> None:
    """Write what others read in /proc as this process's command line or environment, exactly as large as the room is."""
    start, end = place_of(area)
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(data) == end - start, f"{area}: {len(data)} bytes for {end - start}"
    ctypes.memmove(start, data, len(data))


def launcher(line: Sequence[str]) -> NoReturn:
    """Be ``accelerate launch`` with the flags of ``line``, and start its scripts with a `Spawner`."""
    import accelerate.commands.launch as accelerate
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    assert list(line[1:3]) == ["-m", "accelerate.commands.launch"], line
    start = Spawner().start
    accelerate.subprocess = types.SimpleNamespace(Popen=start, CalledProcessError=subprocess.CalledProcessError)
    subprocess_handler.Popen = start
    like_without_u()
    sys.argv = [accelerate.__file__, *line[3:]]
    sys.path[0] = os.getcwd()
    run(accelerate.main)


class Spawner:
    """Forks ranks from a copy of this process that was made before it had threads."""

    def __init__(self) -> None:
        check_alone()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            self._socket.close()
            spawn(theirs)
        theirs.close()

    def start(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None,
        start_new_session: bool = False,
    ) -> Process | subprocess.Popen:  # fmt: skip
        """Start ``args`` as `subprocess.Popen` does; a fork where it is Python with a script."""
        if args[0] != sys.executable or not script_of(args):
            return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=start_new_session)
        files = [0, stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2]
        order = {
            "line": list(args), "environment": dict(os.environ if env is None else env), "session": start_new_session,
            "ignored": ignored_signals(),
        }  # fmt: skip
        adopt(True)
        try:
            send(self._socket, order, files)
            pid = receive(self._socket)[0]["pid"]
        finally:
            adopt(False)
        send(self._socket, {"go": pid})
        return Child(args, pid)


def adopt(on: bool) -> None:
    """Let this process become the parent of its descendants whose parents end, or not."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def spawn(orders: socket.socket) -> NoReturn:
    """Fork the ranks that the launcher asks for until it ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)
    while True:
        order, files = receive(orders)
        if not order:
            os._exit(0)
        told, tell = os.pipe()
        wait, go = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(tell, struct.pack("i", pid))
                os._exit(0)  # the launcher adopts the rank
            os.close(go)
            if not os.read(wait, 1):  # the launcher is gone
                os._exit(1)
            become(order, files)
            script(order["line"])
        os.waitpid(between, 0)
        os.close(tell)
        send(orders, {"pid": struct.unpack("i", os.read(told, 4))[0]})
        message, _ = receive(orders)
        if message:
            os.write(go, b"g")
        for file in (told, wait, go, *files):
            os.close(file)


def script_of(line: Sequence[str]) -> int:
    """Return the index of the script in ``python [-u] SCRIPT ...``; 0 where the line is another one."""
    index = 2 if line[1] == "-u" else 1
    return 0 if line[index].startswith("-") else index


def script(line: Sequence[str]) -> NoReturn:
    """Run ``python [-u] SCRIPT ...``."""
    index = script_of(line)
    if index == 1:
        like_without_u()
    file = line[index]
    sys.argv = list(line[index:])
    # accelerate adds the working folder to PYTHONPATH where it launches DeepSpeed; an interpreter reads it when it starts
    added = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in sys.path[1:]]
    sys.path[:1] = [str(Path(file).resolve().parent), *added]
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    run(lambda: exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__))


def like_without_u() -> None:
    """Make standard output what it is in Python without ``-u``, with which the server runs."""
    if not os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def run(main: Callable[[], Any]) -> NoReturn:
    """Call ``main`` and end as Python does, without this file's part of a traceback.

    Threads are joined and exit functions called, but the interpreter is not torn down: with so many modules, in two seconds.
    """
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
