"""A wheel that is built from the sdist has all that commands need, where no clone is beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.harness import ROOT
from zerobook import __version__

PROJECT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "zerobook", "recipes", "accelerate_configs", "ds_configs")
SHIPPED = {"accelerate_configs": "**/*.yaml", "ds_configs": "**/*.json"}
LIBRARIES = sysconfig.get_paths()["purelib"]
MINE = """
from zerobook.recipes.causal_lm import CausalLM
from zerobook.training.run import run

class Mine(CausalLM):
    pass

if __name__ == "__main__":
    run(Mine)
"""


def run(line: list[object], cwd: Path, expect: int = 0) -> str:
    """Run a command and return what it printed."""
    given = {"OMP_NUM_THREADS": "1", "HOME": cwd, "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu",
             "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}  # fmt: skip
    done = subprocess.run(
        [str(word) for word in line], cwd=cwd, env={key: str(value) for key, value in given.items()}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == expect, f"{line}\n{done.stdout[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The unpacked sdist, built from a copy, so that nothing is written into the clone."""
    folder = tmp_path_factory.mktemp("source")
    for name in PROJECT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
        else:
            shutil.copyfile(ROOT / name, folder / name)
    run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"], folder)
    with tarfile.open(folder / "dist" / f"zerobook-{__version__}.tar.gz") as packed:
        packed.extractall(folder / "unpacked", filter="data")
    return folder / "unpacked" / f"zerobook-{__version__}"


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", target], target)
    (file,) = target.glob("*.whl")
    return file


def test_the_sdist_and_the_wheel_hold_every_file(source, wheel):
    modules = [file for name in ("zerobook", "recipes") for file in (ROOT / name).rglob("*.py")]
    code = {file.relative_to(ROOT).as_posix() for file in modules}
    configs = {file.relative_to(ROOT).as_posix() for file in (ROOT / "recipes" / "configs").rglob("*") if file.is_file()}
    strategies = {
        file.relative_to(ROOT).as_posix() for name, pattern in SHIPPED.items() for file in (ROOT / name).glob(pattern)
    }
    assert len(configs) >= 4 and len(strategies) >= 25
    templates = {file.relative_to(ROOT).as_posix() for file in (ROOT / "zerobook").rglob("*.jinja")}
    tables = {file.relative_to(ROOT).as_posix() for file in (ROOT / "zerobook/interop/configs/tables").glob("*.yaml")}
    everything = code | configs | templates | tables | {"zerobook/runlog/report.html.j2", "zerobook/runlog/charts.js"}
    packed = {file.relative_to(source).as_posix() for file in source.rglob("*") if file.is_file()}
    assert not (everything | strategies | {"setup.py", "pyproject.toml", "LICENSE"}) - packed
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    recipes = {name for name in everything if name.startswith("recipes/")}
    inside = {f"zerobook/{name}" for name in recipes} | {f"zerobook/_shipped/{name}" for name in strategies}
    assert found == (everything - recipes) | inside
    assert f"\nVersion: {__version__}\n" in metadata


def test_an_editable_install_uses_the_clones_files(source, tmp_path):
    """``pip install -e .`` leaves no copies behind, which would hide later edits of the clone's files."""
    code = "from setuptools import build_meta; build_meta.build_editable('dist')"
    run([sys.executable, "-c", code], source)
    assert not (source / "zerobook" / "_shipped").exists()
    (file,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
    # libraries come last: an editable install there has a finder of the same name
    show = (
        f"import site, sys; site.addsitedir({str(tmp_path / 'site')!r}); sys.path.append({LIBRARIES!r}); "
        "from zerobook.recipes.causal_lm import __file__ as recipe; from zerobook.utils.shipped import clone, shipped; "
        "print(recipe, shipped('ds_configs/zero3.json'), clone())"
    )
    said = run([sys.executable, "-S", "-P", "-c", show], tmp_path).split()
    assert said == [str(source / "recipes" / "causal_lm.py"), str(source / "ds_configs" / "zero3.json"), str(source)]


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The folder of an environment's programs, with the wheel installed and this environment's libraries behind it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # .pth files of a folder that is named in one are not read: an editable install there stays out
    (site / "libraries.pth").write_text(LIBRARIES)
    run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", wheel], folder)
    where = run([folder / "bin" / "python", "-c", "import zerobook; print(zerobook.__file__)"], folder)
    assert where.strip() == str(site / "zerobook" / "__init__.py")
    return folder / "bin"


@pytest.mark.launch
@pytest.mark.full
def test_commands_work_without_a_clone(programs, tiny, tmp_path):
    zerobook, python = programs / "zerobook", programs / "python"
    assert run([zerobook, "--version"], tmp_path).strip() == __version__
    metadata = "from importlib.metadata import version; print(version('zerobook'))"
    assert run([python, "-c", metadata], tmp_path).strip() == __version__
    model = ROOT / "benchmarks" / "models" / "gpt2_xl.json"
    line = [zerobook, "plan", "--gpus", "8", "--gpu_memory", "200GB", "--strategies", "ddp,zero2_offload,zero3", "--json"]
    run([*line, "plan.json", model], tmp_path)
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert sorted(row["file"] for row in rows) == ["ddp", "zero2_offload", "zero3"] and not any(row["problems"] for row in rows)
    missing = run([zerobook, "doctor", "--config_file", "accelerate_configs/zero3.yaml"], tmp_path, expect=1)
    assert "zerobook init" in missing

    run([zerobook, "init", "first"], tmp_path)
    first, data = tmp_path / "first", ["--model_name_or_path", tiny / "llama", "--train_file", tiny / "chats.jsonl"]
    words = [*data, "--cache_dir", tmp_path / "cache", "--block_size", "64", "--max_train_samples", "4", "--save_steps", "2",
             "--validation_split_percentage", "0", "--per_device_train_batch_size", "1", "--max_train_steps", "2"]  # fmt: skip
    said = run([zerobook, "doctor", "--config_file", "accelerate_configs/zero3.yaml", "--num_processes", "2"], first)
    assert "ds_configs/zero3.json" in said and "no problems found" in said
    launch = [python, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "1", "--config_file"]
    single = [*launch, "accelerate_configs/single.yaml", "recipes/causal_lm.py", *words, "--output_dir", "run"]
    assert "strategy one process" in run([python, "recipes/causal_lm.py", *words, "--dry-run"], first)
    run(single, first)
    assert '"git":null' in (first / "run" / "runlog" / "events.jsonl").read_text()
    assert "step 2 of 2" in run([zerobook, "runlog", "status", "first/run"], tmp_path)
    assert "1 process" in run([zerobook, "checkpoint", "list", "first/run"], tmp_path)
    assert "wrote exported" in run([zerobook, "export", "first/run", "--output", "exported"], tmp_path)
    run([python, "-c", "import zerobook.cli.chat, zerobook.cli.eval"], tmp_path)

    named = run([zerobook, "launch", "--strategy", "zero3", "--num_processes", "1", "causal_lm", *words, "--dry-run"], tmp_path)
    assert "_shipped/accelerate_configs/zero3.yaml" in named and "strategy ZeRO-3" in named

    (tmp_path / "mine.py").write_text(MINE)
    assert "chats" in run([zerobook, "data", "prepare", "mine.py", *words], tmp_path)
    elsewhere = [*launch, "first/accelerate_configs/zero3.yaml", "mine.py", *words, "--dry-run"]
    assert "strategy ZeRO-3" in run(elsewhere, tmp_path)
