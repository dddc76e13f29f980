"""Load classes of the user that a config names, from files and modules."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest

T = TypeVar("T")


def problem(key: str, spec: str) -> str | None:
    """Return why the class that ``spec`` names cannot be loaded; None if no reason is found. The user's code is not run.

    Args:
        key: the config key with this value. The sentence begins with it.
        spec: ``FILE.py:Class`` or ``module:Class``.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        return f"{key}: {spec!r} does not name a class. Write FILE.py:Class or module:Class."
    if not source.endswith(".py"):
        _make_importable(Path.cwd())
        if _is_importable(source):
            return None
        return f"{key}: {spec}: there is no module {source}. Give one that Python finds, or FILE.py."
    file = Path(source).expanduser()
    if not file.is_file():
        return f"{key}: {spec}: there is no file {source}."
    content = file.read_bytes()
    try:
        ast.parse(content)
    except (SyntaxError, ValueError) as error:
        return f"{key}: {spec}: {source} is not valid Python: {error}."
    # A class whose name is nowhere in the file cannot be there, unless the file has an "import *". If the name is in the file,
    # `load` will see whether the class is there.
    names = set(re.findall(r"[^\W\d]\w*", content.decode(errors="replace")))
    if name in names or b"import *" in content:
        return None
    return f"{key}: {spec}: {source} has no {name}.{nearest(name, names)}"


def load(key: str, spec: str) -> object:
    """Import what ``spec`` names. A file is run only once, even if several of its classes are loaded.

    Raises:
        ConfigError: the file, the module or the name does not exist. Errors of the user's code are passed on.
    """
    reason = problem(key, spec)
    if reason:
        raise ConfigError(reason)
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        module = _import_file(Path(source).expanduser().resolve())
    else:
        module = importlib.import_module(source)
    if not hasattr(module, name):
        raise ConfigError(f"{key}: {spec}: {source} has no {name}.{nearest(name, set(dir(module)))}")
    return getattr(module, name)


def load_class(key: str, spec: str, base: type[T]) -> type[T]:
    """Import the class that ``spec`` names.

    Raises:
        ConfigError: the class does not exist, its file does not run, or it is abstract or does not derive from ``base``.
    """
    try:
        loaded = load(key, spec)
    except ConfigError:
        raise
    # The user's code may raise any other exception when it is imported.
    except Exception as error:
        raise ConfigError(f"{key}: {spec.rpartition(':')[0]} does not run: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"{key}: {spec}: {loaded!r} does not derive from {base.__module__}.{base.__name__}.")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        raise ConfigError(f"{key}: {spec} does not define {missing}, which {base.__name__} requires.")
    return loaded


def _import_file(file: Path) -> ModuleType:
    """Return the module of a file, which is run if it is not loaded yet. It can import modules in its own folder."""
    _make_importable(file.parent, Path.cwd())
    # Loop over a copy: `getattr` on a lazy module may import other modules, which changes sys.modules.
    for module in [*sys.modules.values()]:
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    # The digest of the path is a part of the name, so that files of the same name in different folders are two modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Otherwise the next import would return this incomplete module.
        del sys.modules[name]
        raise
    return module


def _make_importable(*folders: Path) -> None:
    """Add folders to the end of ``sys.path``, if they are not in it yet.

    Accelerate adds the working folder only if it launches DeepSpeed. This function makes it the same for all launchers.
    """
    for folder in map(str, folders):
        # At the end, so that a user's module never replaces an installed one.
        if folder not in sys.path:
            sys.path.append(folder)


def _is_importable(module: str) -> bool:
    """Return whether Python finds the top package of a module. To look for a module in a package, Python runs the package."""
    package = module.partition(".")[0]
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
