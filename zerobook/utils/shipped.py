"""Files that are shipped beside the modules of Zerobook: recipes with their configs, strategy files, DeepSpeed configs.

In a clone they are beside the package, where users type their paths. A wheel has all of them inside the package, because
other projects have a folder ``recipes`` of their own in site-packages.
"""

from pathlib import Path

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest

_PACKAGE = Path(__file__).absolute().parents[1]
# setup.py writes this folder into a wheel. A clone does not have it.
_INSTALLED = _PACKAGE / "_shipped"

# Folder whose files can be called by a name -> the suffix of the files, which their names leave out.
SUFFIXES = {"recipes": ".py", "accelerate_configs": ".yaml"}


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder.

    Args:
        name: the path in a clone, such as ``accelerate_configs/zero3.yaml`` or ``recipes``.
    """
    if clone() is not None:
        return _PACKAGE.parent / name
    # In a wheel, recipes are modules of the package, such as zerobook.recipes.causal_lm.
    folder = _PACKAGE if Path(name).parts[0] == "recipes" else _INSTALLED
    return folder / name


def names(folder: str) -> set[str]:
    """Return the names of the shipped files in one of the folders of `SUFFIXES`, such as ``zero3`` and ``published/zero2``."""
    root = shipped(folder)
    # A file whose name begins with an underscore, such as __init__.py, cannot be launched.
    return {file.relative_to(root).with_suffix("").as_posix() for file in root.glob(f"**/[!_]*{SUFFIXES[folder]}")}


def find(name: str, folder: str, *, beside: Path = Path()) -> Path:
    """Return the file for which a path or a name stands.

    Args:
        name: a path, or one of `names`. A copy of ``folder`` in the working folder, as of ``zerobook init``, is used first.
        folder: the folder of the names, one of `SUFFIXES`.
        beside: a folder besides the working folder to which a path may be relative.

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
    """Return a file's path as a user types it in the working folder, where ``zerobook init`` may have copied shipped files."""
    for folder in SUFFIXES:
        if file.parent == shipped(folder):
            return str(find(file.stem, folder))
    return str(file)


def clone() -> Path | None:
    """Return the root of the clone that this code is run from; None if it was installed from a wheel."""
    return None if _INSTALLED.exists() else _PACKAGE.parent
