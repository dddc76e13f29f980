"""DeepSpeed's C++ ops: compile them before a run, and remove the stale locks of compiles that were killed.

Before 2.15, torch creates a file named ``lock`` while it compiles an extension. If the compile is killed, the file remains, and
every later process waits for it for ever without a message. The compiling process keeps the file open. So a lock is stale if
no process has it open. It must also be older than any compile takes: the cache may be on a network disk, and the processes
of other machines are not visible here. From 2.15 on, the file always remains, and no process waits for it: torch locks it with
flock, and the system releases that lock when its process ends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zerobook.errors import ConfigError
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import say

if TYPE_CHECKING:
    from zerobook.strategy.launch_plan import LaunchPlan

OPS = {
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
    "shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
}
"""Ops that the shipped strategy files use: offload, NVMe's pinned buffers, NVMe, collectives on a CPU, Adam on a GPU."""

NEED_NVCC = ("async_io", "fused_adam")
"""Ops whose builders ask for a CUDA toolkit on a machine with GPUs; async_io does so for its headers and libraries."""

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_KEYS = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Keys of `_CPU_INFO` that tell kinds of CPUs apart: the first two on x86, the others on ARM."""

STALE_AFTER_S = 5 * 60
"""No op takes as long to compile; the slowest took 78 s on two CPU cores."""


def use_own_tools() -> None:
    """Build ops with this environment's ninja and keep them inside this environment, whether or not it is activated.

    torch checks every op with the first ninja on the PATH whenever it loads the op. Different versions of ninja cannot read
    each other's logs, and two environments use different headers: with one cache, each would compile all ops again
    after the other, for minutes and without a message.
    """
    tools = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != tools:
        os.environ["PATH"] = os.pathsep.join([tools, *folders])
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_root())


def cache_root() -> Path:
    """Return the folder of compiled ops: ``$TORCH_EXTENSIONS_DIR``, else in the virtual environment, else torch's default.

    The last two have a folder for each kind of CPU: DeepSpeed compiles for the instructions of the CPU on which it compiles,
    and machines with different CPUs may share the disk.
    """
    chosen_folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen_folder:
        return Path(chosen_folder)
    # Keep the ops in the environment of the packages that they were compiled for: another environment has others.
    environment = Path(sys.prefix)
    if sys.prefix != sys.base_prefix and os.access(environment, os.W_OK):
        return environment / "torch_extensions" / _cpu_kind()
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root()) / _cpu_kind()


def _cpu_kind() -> str:
    """Return a name for machines whose CPUs have the same architecture, model and instructions."""
    facts = []
    with suppress(OSError):
        # The first processor stands for all. Values such as its current frequency change.
        for line in read_text(_CPU_INFO).partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in _CPU_KEYS:
                facts.append(value.strip())
    architecture = platform.machine()
    if not facts:
        return architecture
    return f"{architecture}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def list_locks() -> list[Path]:
    """Return the lock files under the extensions' cache for which torch waits, stale or held."""
    from torch.utils import cpp_extension

    # torch waits for a file with its class FileBaton; without that class, it locks the file with flock.
    return sorted(cache_root().glob("**/lock")) if hasattr(cpp_extension, "FileBaton") else []


def is_held(lock: Path) -> bool:
    """Return whether some process has the file open. Sees this user's processes (all, as root)."""
    lock = lock.resolve()
    # torch's lock is a file that it creates and deletes: one that exists may be left behind.
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if Path(os.readlink(descriptor)) == lock:
                return True
        except OSError:
            continue
    return False


def is_stale(lock: Path) -> bool:
    """Return whether no process here holds the lock, and it is older than `STALE_AFTER_S`."""
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        # The lock is gone.
        return False
    return age > STALE_AFTER_S and not is_held(lock)


def clear_stale_locks(say: Callable[[str], object] = say) -> list[Path]:
    """Remove locks that no process holds; returns them. ``say`` gets a line about each.

    Waits, at most `STALE_AFTER_S`, for a lock that no process here holds and that is too new to judge: torch would
    wait for it too, and for ever if its compile was killed.
    """
    removed = []
    for lock in list_locks():
        if lock.exists() and not is_held(lock) and not is_stale(lock):
            say(
                f"{lock}: no process of this machine holds it; waiting until it is gone or {STALE_AFTER_S} s old. If nothing "
                f"compiles on another machine either: rm {lock}"
            )
        while lock.exists() and not is_held(lock):
            if is_stale(lock):
                lock.unlink(missing_ok=True)
                say(f"removed {lock}: left behind by a compile that was killed")
                removed.append(lock)
                break
            time.sleep(0.5)
    return removed


def find_missing_ops(*, on_gpus: bool) -> dict[str, str]:
    """Return {op: reason} of the ops that cannot be compiled on this machine.

    Ops that DeepSpeed was installed with are left out.

    Args:
        on_gpus: the ops are for GPUs, whose builders ask for a CUDA toolkit.
    """
    reasons = {}
    if not _has_libaio():
        reasons["async_io"] = "it needs libaio's header and library (the package libaio-dev of Debian and Ubuntu)"
    if on_gpus:
        reasons |= _lacking_nvcc()
    return {op: reason for op, reason in reasons.items() if not _is_installed(op)}


def _lacking_nvcc() -> dict[str, str]:
    """Return {op: reason} of the ops that need a CUDA toolkit, if there is none of torch's major version."""
    import torch
    from torch.utils import cpp_extension

    # ROCm compiles with a compiler of its own.
    if torch.version.hip:
        return {}
    home = cpp_extension.CUDA_HOME
    version = _nvcc_version(home) if home else None
    # An op takes the headers and the runtime of nvcc's toolkit, and CUDA is compatible within a major version only. Neither
    # torch nor DeepSpeed compares the versions of an op that is compiled at its first use.
    if version and version.split(".")[0] == (torch.version.cuda or "").split(".")[0]:
        return {}
    if version:
        state = f"the nvcc in {home} is of CUDA {version}; install the toolkit of torch's CUDA version and set CUDA_HOME to it"
    else:
        state = f"CUDA_HOME is {home}" if home else "there is no nvcc on the PATH, and CUDA_HOME is not set"
    return dict.fromkeys(
        NEED_NVCC, f"it needs nvcc, from the CUDA toolkit that torch was built for ({torch.version.cuda}), and {state}"
    )


def _nvcc_version(home: str) -> str | None:
    """Return the CUDA version of the compiler in a toolkit's folder, such as 13.0; None if no compiler runs there."""
    try:
        printed = subprocess.run([Path(home) / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", printed)
    return release[1] if release else None


def _has_libaio() -> bool:
    """Return whether the C compiler finds libaio's header, with the same CFLAGS as DeepSpeed's builder."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler, *flags, "-fsyntax-only", "-include", "libaio.h", "-x", "c", os.devnull]
    try:
        check = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return check.returncode == 0


def _is_installed(op: str) -> bool:
    """Return whether DeepSpeed was installed with the op, so that it is never compiled."""
    package = importlib.util.find_spec("deepspeed")
    folder = Path(package.origin).parent / "ops" if package and package.origin else Path()
    return any(folder.glob(f"*/{op}_op*.so"))


def needed_ops(plan: LaunchPlan) -> list[str]:
    """Return the ops that a run will load."""
    ops = []
    if plan.device == "cpu" and plan.world_size > 1:
        ops.append("shm_comm")
    devices = {plan.offload_optimizer, plan.offload_param}
    # DeepSpeed takes pinned buffers from torch, or from its own op if this variable says so.
    pins_by_op = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native"
    # async_io always takes its buffers from pin_memory.
    if "nvme" in devices or (pins_by_op and devices != {"none"}):
        ops.append("pin_memory")
    if "nvme" in devices:
        ops.append("async_io")
    section = (plan.deepspeed_config or {}).get("optimizer") or {}
    # With an offloaded optimizer, DeepSpeed's CPU Adam updates the weights, whether or not the JSON has a section.
    if plan.offload_optimizer != "none" and plan.optimizer == "adamw":
        ops.append("cpu_adam")
    # DeepSpeed makes its fused Adam by such a section. Without a section, the run passes an optimizer to DeepSpeed.
    elif section and not section.get("params", {}).get("torch_adam"):
        ops.append("fused_adam")
    return ops


def _is_compiled(op: str) -> bool:
    """Return whether the op was compiled on this machine."""
    return any(cache_root().glob(f"*{op}/*.so"))


def compile_needed(plan: LaunchPlan) -> None:
    """Compile the ops of a run that are not compiled yet, with a line about each. Other processes of the machine wait.

    Raises:
        ConfigError: an op cannot be compiled.
    """
    absent = [op for op in needed_ops(plan) if not _is_compiled(op) and not _is_installed(op)]
    if not absent:
        return
    for op, outcome in compile_ops(absent):
        if outcome.startswith("FAILED"):
            raise ConfigError(
                f"DeepSpeed's op {op}, which {plan.name} needs, cannot be compiled: {outcome.removeprefix('FAILED: ')}. "
                "make setup compiles all ops and shows the compiler's output."
            )


def compile_ops(requested: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Compile those of the ``requested`` ops that this machine can use. Returns (op, outcome) for each.

    Each compile is announced on the terminal. On a machine without a GPU the CPU variants are built. An op that is compiled
    already is only loaded, which takes a second.

    Args:
        requested: keys of `OPS`; None means all that the project's strategy files use on this device.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    use_own_tools()
    clear_stale_locks()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    lacking = find_missing_ops(on_gpus=not on_cpu)
    results = []
    for op in requested or OPS:
        builder = accelerator.create_op_builder(OPS[op])
        # shm_comm is a transport between processes that compute on CPUs, and FusedAdam has no CPU variant.
        if builder is None or (op, on_cpu) in (("shm_comm", False), ("fused_adam", True)):
            continue
        if op in lacking:
            results.append((op, f"skipped: {lacking[op]}"))
            continue
        if not builder.is_compatible(verbose=False):
            advice = "install libaio-dev" if op == "async_io" else "not supported here"
            results.append((op, f"skipped: {advice}"))
            continue
        if not _is_compiled(op):
            say(f"compiling {op} (up to 3 minutes) ...")
        start = time.monotonic()
        try:
            builder.load(verbose=False)
            results.append((op, f"ready in {time.monotonic() - start:.0f} s"))
        except Exception as error:
            # Errors of ninja, the compiler and the linker have no common base class.
            results.append((op, f"FAILED: {str(error).splitlines()[0]}"))
        say(f"  {op}: {results[-1][1]}")
    return results
