"""Collect the wheels that a GPU machine without a network lacks, and print their sizes.

usage: gpu_wheels.py INSTALLED [--python 3.12] [--cuda 13.0] [--tests] [--dest wheels]

INSTALLED is the output of ``pip list --format=freeze`` on that machine. Needs a network, and the packages of requirements.txt
here: their requirements are followed, and their versions are taken. What is only source on PyPI is built (DeepSpeed's wheel is
of pure Python). bitsandbytes' wheel has kernels for every CUDA version; with ``--cuda``, only those of that one are kept.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
UNUSED = {"rouge-score", "sacrebleu", "matplotlib", "jinja2"}
"""Dependencies that no training run imports: scorers of generated text, charts and pages."""
TESTS = ["pytest", "pytest-timeout", "hypothesis", "chatterbot-corpus"]
# pip compares these names exactly.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
KERNELS = re.compile(r"bitsandbytes/libbitsandbytes_(cuda|rocm|xpu)(\w*)\.so")


def missing_packages(roots: list[str], installed: dict[str, str], python: str) -> dict[str, str]:
    """Return {package: version here} of ``roots`` and all that they need, without what is installed and new enough.

    Args:
        roots: requirements, as in pyproject.toml.
        installed: package -> version; "" if it is not known. What these need is taken to be there too.
        python: version of Python on the machine, such as ``3.12``.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    versions: dict[str, str] = {}
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        is_needed = requirement.marker is None or requirement.marker.evaluate(environment)
        installed_version = installed.get(name)
        is_installed = installed_version is not None and is_new_enough(installed_version, requirement.specifier)
        if is_installed or name in versions or not is_needed:
            continue
        package = distribution(name)
        versions[name] = package.version
        waiting += [Requirement(line) for line in package.requires or []]
    return dict(sorted(versions.items()))


def is_new_enough(version: str, specifier: SpecifierSet) -> bool:
    """Return whether an installed version meets a requirement; one that is not known does.

    A pre-release counts as its release: NVIDIA's containers have builds such as ``2.11.0a0+git.nv26.01``.
    """
    if version == "" or specifier.contains(version):
        return True
    return Version(version).is_prerelease and specifier.contains(Version(version).base_version)


def read_installed(file: Path) -> dict[str, str]:
    """Return {package: version} of the output of ``pip list --format=freeze``, or of a list of names."""
    installed = {}
    for line in file.read_text().splitlines():
        name, _, version = line.partition("==")
        # An installation from a folder is shown with its path, not its version.
        name = name.split("@")[0].strip()
        if name:
            installed[canonicalize_name(name)] = version.strip()
    return installed


def collect(package: str, version: str, python: str, dest: Path) -> None:
    """Download a wheel for that Python on x86-64 Linux, or build one if there is only source."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(dest)]
    for platform in PLATFORMS:
        options += ["--platform", f"{platform}_x86_64"]
    download = subprocess.run([*pip, "download", *options, f"{package}=={version}"], capture_output=True)
    if download.returncode:
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(dest), f"{package}=={version}"], check=True)


def keep_kernels(wheel: Path, cuda: str) -> None:
    """Remove from bitsandbytes' wheel the kernels of other versions of CUDA than ``cuda``, such as ``13.0``.

    Raises:
        ValueError: the wheel has none of that version.
    """
    version = cuda.replace(".", "")
    removed = set()
    has_kernels = False
    smaller = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            kernels = KERNELS.fullmatch(entry.filename)
            if kernels and kernels.groups() != ("cuda", version):
                removed.add(entry.filename)
                continue
            has_kernels = has_kernels or kernels is not None
            content = source.read(entry)
            # RECORD lists the files, and is the last one.
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if line.split(",")[0] not in removed).encode()
            target.writestr(entry, content)
    if not has_kernels:
        smaller.unlink()
        raise ValueError(f"{wheel.name} has no kernels for CUDA {cuda}")
    smaller.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("installed", type=Path, help="file with the packages of the machine")
    parser.add_argument("--python", default="3.12", help="version of Python there (default: 3.12)")
    parser.add_argument("--cuda", help="version of CUDA that torch there was built for, such as 13.0; unset: all kernels")
    parser.add_argument("--tests", action="store_true", help="also what the tests marked gpu need")
    parser.add_argument("--dest", type=Path, default=Path("wheels"), help="folder for the wheels (default: wheels)")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [line for line in project["dependencies"] if canonicalize_name(Requirement(line).name) not in UNUSED]
    roots += TESTS if options.tests else []
    packages = missing_packages(roots, read_installed(options.installed), options.python)
    if "torch" in packages:
        sys.exit("the machine has no torch, or one that is older than pyproject.toml's: take another image.")
    options.dest.mkdir(parents=True, exist_ok=True)
    for package, version in packages.items():
        collect(package, version, options.python, options.dest)
    if options.cuda:
        for wheel in options.dest.glob("bitsandbytes-*.whl"):
            keep_kernels(wheel, options.cuda)
    total = 0
    for wheel in sorted(options.dest.glob("*.whl")):
        size = wheel.stat().st_size
        total += size
        print(f"{size / 2**20:7.2f} MiB  {wheel.name}")
    print(f"{total / 2**20:7.2f} MiB  in all: {options.dest}")


if __name__ == "__main__":
    main()
