"""DeepSpeed's C++ ops: compile them before a run, and remove the stale locks of compiles that were killed.

Before 2.15, torch creates a file named ``lock`` while it compiles an extension, and keeps the file open. If the compile is
killed, the file remains, and every later process waits for ever, without a message, until it is removed. A lock is stale if no
process has it open and it is older than any compile takes. Its age counts, too, since the cache may be on a network disk, and
processes of other machines are not visible here. From 2.15 on, the file always remains, and no process waits for its removal:
torch locks it with flock, and the system releases that lock when its process ends.
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
from typing import TYPE_CHECKING, Any

from zerobook.errors import ConfigError
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import say

if TYPE_CHECKING:
    from zerobook.strategy.launch_plan import LaunchPlan

# Op that a shipped strategy file uses -> DeepSpeed's class that builds it. In this order, the ops are for offload, pinned
# buffers of NVMe offload, NVMe, collectives on a CPU, and Adam on a GPU.
OPS = {
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
    "shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
}

# Ops whose builders need a CUDA toolkit on a machine with GPUs. async_io needs its headers and libraries.
NEED_NVCC = ("async_io", "fused_adam")

_CPU_INFO = Path("/proc/cpuinfo")
# Keys of this file by which kinds of CPUs differ: the first two on x86, the others on ARM.
_CPU_KEYS = ("model name", "flags", "CPU implementer", "CPU part", "Features")

# Seconds that are longer than any compile. The slowest op took 78 s on two CPU cores.
STALE_AFTER_S = 5 * 60


def use_own_tools() -> None:
    """Build ops with this environment's ninja, and keep them inside this environment, even if it is not activated.

    Whenever torch loads an op, the first ninja on the PATH checks whether the op is up to date. Versions of ninja cannot read
    each other's logs, and environments have different headers. So with one cache, two environments would compile all ops again
    after each other, for minutes and without a message.
    """
    tools = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != tools:
        os.environ["PATH"] = os.pathsep.join([tools, *folders])
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_root())


def cache_root() -> Path:
    """Return the folder of compiled ops.

    It is ``$TORCH_EXTENSIONS_DIR`` if this is set; else in the virtual environment, or in torch's default folder. There, each
    kind of CPU has a folder, since DeepSpeed uses all instructions of the CPU that compiles, and machines may share a disk.
    """
    chosen_folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen_folder:
        return Path(chosen_folder)
    # Keep the ops beside the packages that they are compiled for. Another environment may have other versions of these.
    environment = Path(sys.prefix)
    if sys.prefix != sys.base_prefix and os.access(environment, os.W_OK):
        return environment / "torch_extensions" / _name_cpu_kind()
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root()) / _name_cpu_kind()


def _name_cpu_kind() -> str:
    """Return a name that is the same on machines whose CPUs have the same architecture, model and instructions."""
    facts = []
    with suppress(OSError):
        # Read the first processor only. Other keys, such as the current frequency, change with time.
        for line in read_text(_CPU_INFO).partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in _CPU_KEYS:
                facts.append(value.strip())
    architecture = platform.machine()
    if not facts:
        return architecture
    return f"{architecture}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def list_locks() -> list[Path]:
    """Return the lock files in the cache of ops that torch waits for. They may be stale."""
    from torch.utils import cpp_extension

    # Versions of torch without this class use flock, and do not wait for a file to be removed.
    if not hasattr(cpp_extension, "FileBaton"):
        return []
    return sorted(cache_root().glob("**/lock"))


def is_held(lock: Path) -> bool:
    """Return whether a process of this user has the file open; as root, whether any process has."""
    lock = lock.resolve()
    # Each open file of a process is a link in this folder.
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


def clear_stale_locks(report: Callable[[str], object] = say) -> list[Path]:
    """Remove stale locks and return them. Pass a line about each lock to ``report``.

    Wait, at most `STALE_AFTER_S`, for a lock that no process of this machine holds and that may be held on another machine.
    torch would wait for it, too, and for ever if its compile was killed.
    """
    removed = []
    for lock in list_locks():
        if lock.exists() and not is_held(lock) and not is_stale(lock):
            report(
                f"{lock}: no process of this machine holds it; waiting until it is gone or {STALE_AFTER_S} s old. If nothing "
                f"compiles on another machine either: rm {lock}"
            )
        while lock.exists() and not is_held(lock):
            if is_stale(lock):
                lock.unlink(missing_ok=True)
                report(f"removed {lock}: left behind by a compile that was killed")
                removed.append(lock)
                break
            time.sleep(0.5)
    return removed


def find_missing_ops(*, on_gpus: bool) -> dict[str, str]:
    """Return the ops that cannot be compiled on this machine, op -> reason. Ops that DeepSpeed was installed with are left out.

    Args:
        on_gpus: the ops are for a run on GPUs, so some of their builders need a CUDA toolkit.
    """
    reasons = {}
    if not _has_libaio():
        reasons["async_io"] = "it needs libaio's header and library (the package libaio-dev of Debian and Ubuntu)"
    if on_gpus:
        reasons |= _find_ops_without_nvcc()
    return {op: reason for op, reason in reasons.items() if not _is_installed(op)}


def _find_ops_without_nvcc() -> dict[str, str]:
    """Return the ops that need a CUDA toolkit, op -> reason, if there is no toolkit of torch's major version; else nothing."""
    import torch
    from torch.utils import cpp_extension

    # ROCm has another compiler.
    if torch.version.hip:
        return {}
    home = cpp_extension.CUDA_HOME
    version = _read_nvcc_version(home) if home else None
    # An op is compiled with the headers and the runtime of nvcc's toolkit, and CUDA is compatible within a major version only.
    # Neither torch nor DeepSpeed compares the versions if an op is compiled at its first use.
    if version and version.split(".")[0] == (torch.version.cuda or "").split(".")[0]:
        return {}
    if version:
        state = f"the nvcc in {home} is of CUDA {version}; install the toolkit of torch's CUDA version and set CUDA_HOME to it"
    else:
        state = f"CUDA_HOME is {home}" if home else "there is no nvcc on the PATH, and CUDA_HOME is not set"
    return dict.fromkeys(
        NEED_NVCC, f"it needs nvcc, from the CUDA toolkit that torch was built for ({torch.version.cuda}), and {state}"
    )


def _read_nvcc_version(home: str) -> str | None:
    """Return the CUDA version of the compiler in a toolkit's folder, such as 13.0; None if there is no working compiler."""
    try:
        output = subprocess.run([Path(home) / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", output)
    return release[1] if release else None


def _has_libaio() -> bool:
    """Return whether the C compiler finds libaio's header. DeepSpeed's builder calls the compiler with the same CFLAGS."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    # Parse an empty C file that includes the header, and write nothing.
    command = [*compiler, *flags, "-fsyntax-only", "-include", "libaio.h", "-x", "c", os.devnull]
    try:
        check = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return check.returncode == 0


def _is_installed(op: str) -> bool:
    """Return whether DeepSpeed was installed with the compiled op, so that a run does not compile it."""
    package = importlib.util.find_spec("deepspeed")
    folder = Path(package.origin).parent / "ops" if package and package.origin else Path()
    return any(folder.glob(f"*/{op}_op*.so"))


def list_needed_ops(plan: LaunchPlan) -> list[str]:
    """Return the ops that a run will load."""
    ops = []
    if plan.device == "cpu" and plan.world_size > 1:
        ops.append("shm_comm")
    devices = {plan.offload_optimizer, plan.offload_param}
    # DeepSpeed pins buffers by torch, or by its own op if this variable says so.
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
    # DeepSpeed makes its fused Adam from the section. Without a section, the run passes an optimizer to DeepSpeed.
    elif section and not section.get("params", {}).get("torch_adam"):
        ops.append("fused_adam")
    return ops


def _is_compiled(op: str) -> bool:
    """Return whether the cache has a compiled library of the op."""
    return any(cache_root().glob(f"*{op}/*.so"))


def compile_needed_ops(plan: LaunchPlan) -> None:
    """Compile the ops of a run that are not compiled yet. Other processes of the machine wait for torch's lock meanwhile.

    Raises:
        ConfigError: an op cannot be compiled.
    """
    absent = [op for op in list_needed_ops(plan) if not _is_compiled(op) and not _is_installed(op)]
    # An empty list would mean all ops to `compile_ops`.
    if not absent:
        return
    for op, outcome in compile_ops(absent):
        if outcome.startswith("FAILED"):
            raise ConfigError(
                f"DeepSpeed's op {op}, which {plan.name} needs, cannot be compiled: {outcome.removeprefix('FAILED: ')}. "
                "make setup compiles all ops and shows the compiler's output."
            )


def compile_ops(requested: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Compile those of the ``requested`` ops that this machine can use. Return (op, outcome) for each of them.

    On a machine without a GPU, the variants for a CPU are compiled.

    Args:
        requested: keys of `OPS`; None: all keys.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    use_own_tools()
    clear_stale_locks()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    missing = find_missing_ops(on_gpus=not on_cpu)
    # shm_comm moves data between processes that compute on CPUs, and FusedAdam has no variant for a CPU.
    op_of_other_device = "fused_adam" if on_cpu else "shm_comm"
    results = []
    for op in requested or OPS:
        builder = accelerator.create_op_builder(OPS[op])
        if builder is None or op == op_of_other_device:
            continue
        if op in missing:
            outcome = f"skipped: {missing[op]}"
        elif not builder.is_compatible(verbose=False):
            outcome = "skipped: install libaio-dev" if op == "async_io" else "skipped: not supported here"
        else:
            outcome = _load_op(op, builder)
        results.append((op, outcome))
    return results


def _load_op(op: str, builder: Any) -> str:
    """Load an op, which compiles it if necessary. Print lines about it, and return the outcome."""
    if not _is_compiled(op):
        say(f"compiling {op} (up to 3 minutes) ...")
    start = time.monotonic()
    try:
        builder.load(verbose=False)
        outcome = f"ready in {time.monotonic() - start:.0f} s"
    except Exception as error:
        # Errors of ninja, the compiler and the linker have no common base class.
        outcome = f"FAILED: {str(error).splitlines()[0]}"
    say(f"  {op}: {outcome}")
    return outcome
