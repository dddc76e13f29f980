"""scripts/gpu_wheels.py finds what a machine without a network lacks, and leaves kernels for other GPUs out."""

from __future__ import annotations

import zipfile

import pytest

from scripts import gpu_wheels


def test_what_is_not_installed_is_followed_to_its_requirements():
    packages = gpu_wheels.missing_packages(
        ["deepspeed>=0.1", "torch"], dict.fromkeys(("torch", "numpy", "pydantic"), ""), "3.12"
    )
    assert {"deepspeed", "hjson"} <= packages.keys()
    assert not {"torch", "numpy", "pydantic", "pydantic-core"} & packages.keys(), "what is there has its requirements"


def test_only_what_another_python_needs_is_taken():
    roots = ["tomli; python_version < '3.11'", "psutil; python_version >= '3.12'", "zstandard; extra == 'all'"]
    assert list(gpu_wheels.missing_packages(roots, {}, "3.12")) == ["psutil"]


def test_names_of_installed_packages_are_read_from_pip(tmp_path):
    file = tmp_path / "installed.txt"
    file.write_text("torch==2.11.0+cu130\nPyYAML==6.0\nruamel_yaml\npeft @ file:///tmp/peft\n\n")
    versions = {"torch": "2.11.0+cu130", "pyyaml": "6.0", "ruamel-yaml": "", "peft": ""}
    assert gpu_wheels.read_installed(file) == versions


def test_what_is_too_old_is_taken_too():
    installed = {"torch": "2.11.0+cu130", "psutil": "5.0"}
    assert list(gpu_wheels.missing_packages(["torch>=2.11", "psutil>=5.9"], installed, "3.12")) == ["psutil"]


@pytest.mark.parametrize("version", ["2.11.0a0+1234567.nv26.01", "2.12.0.dev20260901+cu130", "2.11.0rc2", "2.11.0+cu130"])
def test_a_build_of_a_new_enough_release_is_taken_as_it_is(version):
    assert gpu_wheels.missing_packages(["torch>=2.11"], {"torch": version}, "3.12") == {}


@pytest.mark.parametrize("version", ["2.10.0a0+1234567.nv25.12", "2.10.0+cu130"])
def test_a_build_of_an_older_release_is_too_old(version):
    assert "torch" in gpu_wheels.missing_packages(["torch>=2.11"], {"torch": version}, "3.12")


def wheel(folder):
    path = folder / "bitsandbytes-1.0-py3-none-any.whl"
    files = ["__init__.py", *(f"libbitsandbytes_{name}.so" for name in ("cpu", "cuda121", "cuda130", "rocm70", "xpu2025"))]
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(f"bitsandbytes/{file}", "content")
        archive.writestr("bitsandbytes-1.0.dist-info/RECORD", "".join(f"bitsandbytes/{file},sha256=x,7\n" for file in files))
    return path


def test_kernels_of_one_cuda_version_are_kept(tmp_path):
    path = wheel(tmp_path)
    gpu_wheels.keep_kernels(path, "13.0")
    with zipfile.ZipFile(path) as archive:
        names = {name.split("_", 1)[1] for name in archive.namelist() if name.endswith(".so")}
        record = archive.read("bitsandbytes-1.0.dist-info/RECORD").decode()
    assert names == {"cpu.so", "cuda130.so"}
    assert "cuda130" in record and "__init__" in record
    assert "cuda121" not in record and "rocm" not in record


def test_a_wheel_without_kernels_for_that_version_stays_as_it_is(tmp_path):
    path = wheel(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"12\.8"):
        gpu_wheels.keep_kernels(path, "12.8")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
