"""Load the user's classes that a config names, from files and modules."""

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
    """Return why ``spec`` cannot be loaded, as far as can be checked without running it; None if no problem is found.

    Args:
        key: the config key that holds it, with which the sentence begins.
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
    # A name that stands nowhere in the file is a mistake, unless an import of everything binds it. Any other one is looked for
    # when the file is run.
    names = set(re.findall(r"[^\W\d]\w*", content.decode(errors="replace")))
    if name in names or b"import *" in content:
        return None
    return f"{key}: {spec}: {source} has no {name}.{nearest(name, names)}"


def load(key: str, spec: str) -> object:
    """Import what ``spec`` names. A file is run once, however many of its classes are loaded.

    Raises:
        ConfigError: it is not there. Errors of the user's code are passed on.
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
        ConfigError: it is not there, its file does not run, or it is not a class that derives from ``base``, or abstract.
    """
    try:
        loaded = load(key, spec)
    except ConfigError:
        raise
    except Exception as error:
        # A user's code may raise anything.
        raise ConfigError(f"{key}: {spec.rpartition(':')[0]} does not run: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"{key}: {spec}: {loaded!r} does not derive from {base.__module__}.{base.__name__}.")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        raise ConfigError(f"{key}: {spec} does not define {missing}, which {base.__name__} requires.")
    return loaded


def _import_file(file: Path) -> ModuleType:
    """Return the module of a file, which is run if it is not loaded yet. It can import what lies beside it."""
    _make_importable(file.parent, Path.cwd())
    # `getattr` on a lazy module can import others, which would change the dict during the loop.
    for module in [*sys.modules.values()]:
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    # Two files of one name, in different folders, are two modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # An incomplete module must not stay in the cache of imports.
        del sys.modules[name]
        raise
    return module


def _make_importable(*folders: Path) -> None:
    """Add folders to Python's path, if they are not there yet.

    Of accelerate's launchers, DeepSpeed's alone does so with the working folder. Under every launcher it is the same from here.
    """
    for folder in map(str, folders):
        # Behind all others, so that a user's module never replaces an installed one.
        if folder not in sys.path:
            sys.path.append(folder)


def _is_importable(module: str) -> bool:
    """Return whether Python finds a module's package. To find a module inside of it, Python would run the package."""
    package = module.partition(".")[0]
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
