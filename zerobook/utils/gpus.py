"""NVIDIA GPUs that this process may use and torch cannot, with the reason.

torch reports that there is no GPU also if the driver is too old for it, or if torch was built without CUDA. If torch has no
kernels for a GPU, it reports the GPU with a warning, and the first computation on it fails.
"""

import os
import re
from ctypes.util import find_library
from pathlib import Path

from zerobook.utils.units import counted

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")


def unused(torch_version: str, built_for: str | None) -> str | None:
    """Return which GPUs torch does not see, and why; None if there are none or if the environment hides them.

    Call this function only if torch sees no GPU.

    Args:
        torch_version: ``torch.__version__``.
        built_for: ``torch.version.cuda``; None for a build without CUDA.
    """
    gpus = devices()
    # A container on a host with GPUs may lack the driver's library, without which no process can use a GPU.
    if hidden() or not gpus or find_library("cuda") is None:
        return None
    build = "without CUDA" if built_for is None else f"for CUDA {built_for}"
    return (
        f"torch {torch_version} sees no GPU, but this process may use {counted(len(gpus), 'NVIDIA GPU')} ({', '.join(gpus)}): "
        f"torch is built {build}, and the driver is version {driver_version()}. nvidia-smi shows which CUDA it supports; "
        "update it, or install a torch built for that CUDA or an older one. python -c 'import torch; torch.cuda.init()' prints "
        'torch\'s error. To train on the CPU, set use_cpu: true in the Accelerate YAML or CUDA_VISIBLE_DEVICES="".'
    )


def find_without_kernels() -> tuple[int, str | None]:
    """Return the index of the first GPU for which torch has no kernels, and a message; (0, None) if there is no such GPU.

    Call this function only if torch sees GPUs.
    """
    import torch

    architectures = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        # torch.version.cuda is None in a build for AMD's GPUs, whose architectures have other names.
        if torch.version.cuda and not has_kernels(capability, architectures):
            return index, (
                f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, has no kernels for GPU {index} "
                f"({torch.cuda.get_device_name(index)}): its compute capability is {'.'.join(map(str, capability))}, and this "
                f"build has {', '.join(architectures)}. Install torch's build for CUDA 12.6, which has kernels for compute "
                "capabilities from 5.0 to 9.0, or one for a newer CUDA if the GPU is newer. To train without this GPU, leave "
                "it out of CUDA_VISIBLE_DEVICES, or set use_cpu: true in the Accelerate YAML."
            )
    return 0, None


def has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return whether a build of torch has kernels that a GPU can execute.

    Args:
        capability: the compute capability of the GPU, (major version, minor version).
        architectures: ``torch.cuda.get_arch_list()``. Machine code, such as ``sm_86``, runs on GPUs with the same major version
            and this or a higher minor version. PTX, such as ``compute_86``, is translated by the driver for this capability and
            all higher ones.

    >>> has_kernels((8, 9), ["sm_75", "sm_86"]), has_kernels((7, 0), ["sm_75", "sm_86"]), has_kernels((9, 0), ["compute_86"])
    (True, False, True)
    """
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(architectures)):
        if (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0]):
            return True
    return False


def hidden() -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` hides every device: it is empty, or begins with an entry such as -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return False
    # CUDA uses the entries before the first one that is no device.
    first = visible.split(",")[0].strip()
    return not (first.isdigit() or first.startswith(("GPU-", "MIG-")))


def devices() -> list[str]:
    """Return the GPUs' device files that this process can open. A container or a job's control group may deny others."""
    files = []
    # Sort by the length of the name first, so that nvidia10 comes after nvidia9.
    for file in sorted(DEVICES.glob("nvidia[0-9]*"), key=lambda file: (len(file.name), file.name)):
        try:
            os.close(os.open(file, os.O_RDWR))
        except OSError:
            continue
        files.append(str(file))
    return files


def driver_version() -> str:
    """Return the version of the kernel driver, such as ``535.104.05``, or ``unknown``."""
    try:
        # The line has "Kernel Module  535.104.05", or with open modules "Kernel Module for x86_64  535.104.05".
        words = DRIVER.read_text().partition("Kernel Module")[2].split()
    except OSError:
        words = []
    return next((word for word in words if word[0].isdigit()), "unknown")
