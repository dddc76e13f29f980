"""Checks of the programs and headers that torch compiles kernels with."""

import os
import shutil
import sysconfig
from pathlib import Path


def missing_compiler() -> str | None:
    """Return what this machine lacks to compile models and flex attention, and how to install it; None if nothing is missing.

    torch generates C++ that includes Python's headers. So does Triton, whose compiler is gcc or clang.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "a C++ compiler: install g++"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file():
        return f"Python's headers, {headers}: install python3-dev"
    return None
