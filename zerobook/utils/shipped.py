"""Files that are shipped beside the modules of Zerobook: recipes with their configs, strategy files, DeepSpeed configs.

In a clone they are beside the package, where users type their paths. A wheel has all of them inside the package, because
other projects have a folder ``recipes`` of their own in site-packages.
"""

from pathlib import Path

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest

_PACKAGE = Path(__file__).absolute().parents[1]
_INSTALLED = _PACKAGE / "_shipped"
"""Folder that setup.py writes into a wheel."""

SUFFIXES = {"recipes": ".py", "accelerate_configs": ".yaml"}
"""Folder of files that have names -> the end of such a file, which its name leaves out"""


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder.

    Args:
        name: its path in a clone, such as ``accelerate_configs/zero3.yaml`` or ``recipes``.
    """
    if clone() is not None:
        return _PACKAGE.parent / name
    # Recipes are modules: zerobook.recipes.causal_lm.
    folder = _PACKAGE if Path(name).parts[0] == "recipes" else _INSTALLED
    return folder / name


def names(folder: str) -> set[str]:
    """Return the names of the shipped files in one of the folders of `SUFFIXES`, such as ``zero3`` and ``published/zero2``."""
    root = shipped(folder)
    return {file.relative_to(root).with_suffix("").as_posix() for file in root.glob(f"**/[!_]*{SUFFIXES[folder]}")}


def find(name: str, folder: str, *, beside: Path = Path()) -> Path:
    """Return the file that a name stands for: a path as it is, or a file of ``folder``.

    Args:
        name: a path, or one of `names`. In a clone, and where ``zerobook init`` was run, the files there are taken.
        folder: one of `SUFFIXES`.
        beside: another folder at which a path may start.

    Raises:
        ConfigError: there is no such file.
    """
    file_name = f"{name}{SUFFIXES[folder]}"
    for path in (Path(name).expanduser(), beside / name, Path(folder, file_name), shipped(folder) / file_name):
        if path.is_file():
            return path
    known = names(folder)
    raise ConfigError(
        f"{name}: there is no such file, and none of this name is shipped.{nearest(name, known)} There are "
        f"{', '.join(sorted(known))}."
    )


def path_from_here(file: Path) -> str:
    """Return a file's path as it is typed in the working folder, where ``zerobook init`` may have copied shipped files."""
    for folder in SUFFIXES:
        if file.parent == shipped(folder):
            return str(find(file.stem, folder))
    return str(file)


def clone() -> Path | None:
    """Return the root of the clone that this code is run from; None if it was installed from a wheel."""
    return None if _INSTALLED.exists() else _PACKAGE.parent
