"""Import every module and try the GPU benchmark on the CPU, with torch as PyPI builds it for CUDA; no GPU is needed.

The versions are written into docs/measured/gpu.md, between two marks.

usage: cuda_build.py
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "gpu.md"
BEGIN = "<!-- written by scripts/cuda_build.py -->"
END = "<!-- end of cuda_build.py -->"
LIBRARIES = ("accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets", "triton")
LIMIT_S = 3600


def import_modules(package_name: str) -> int:
    """Import every module of a package and return their number."""
    package = import_module(package_name)
    names = [module.name for module in walk_packages(package.__path__, f"{package_name}.")]
    for name in names:
        import_module(name)
    return len(names)


def try_benchmark(folder: Path) -> dict[str, Any]:
    """Run the first case of every part of the GPU benchmark on the CPU, and return its record."""
    command = [sys.executable, "benchmarks/gpu.py", "all", "--device", "cpu", "--scale", "tiny", "--limit", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(folder)], cwd=ROOT, env=environment, check=True, timeout=LIMIT_S)
    return json.loads((folder / "CPU.json").read_text())


def failed_cases(record: dict[str, Any]) -> list[str]:
    """Return the names of the cases that ended with an error."""
    return [f"{part}: {name}" for part, rows in record["parts"].items() for name, row in rows.items() if "error" in row]


def describe(modules: int, record: dict[str, Any]) -> str:
    """Return the section of the page as Markdown."""
    import torch

    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    day = datetime.now(UTC).strftime("%-d %B %Y")
    return (
        f"{day}, Python {platform.python_version()}, torch {torch.__version__} (CUDA {torch.version.cuda}), {libraries}: "
        f"all {modules} modules of zerobook were imported. The first case of each part of `benchmarks/gpu.py --scale tiny` "
        f"ran on the CPU without an error: {', '.join(record['parts'])}. `make test-cuda-build` repeats it."
    )


def replace_section(text: str, section: str) -> str:
    """Return the page's text with ``section`` between the marks.

    Raises:
        ValueError: the marks are not there once.
    """
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    replaced, count = re.subn(pattern, lambda _: f"{BEGIN}\n{section}\n{END}", text, flags=re.S)
    if count != 1:
        raise ValueError(f"the marks {BEGIN} and {END} are {count} times in the text; they have to be there once.")
    return replaced


def main() -> None:
    import torch

    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} is not built for CUDA. make test-cuda-build installs one that is.")
    modules = import_modules("zerobook")
    with tempfile.TemporaryDirectory() as folder:
        record = try_benchmark(Path(folder))
    failed = failed_cases(record)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    PAGE.write_text(replace_section(PAGE.read_text(), describe(modules, record)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
