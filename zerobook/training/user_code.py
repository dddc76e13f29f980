"""Classes from a user's Python file, named as ``FILE.py:Class``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import zlib
from pathlib import Path
from typing import TypeVar

from zerobook.errors import ConfigError

T = TypeVar("T")


def load_class(reference: str, base: type[T], key: str) -> type[T]:
    """Run a user's file and return the class that ``reference`` names. A file is run once in a process.

    Args:
        reference: ``FILE.py:Class``.
        base: what the class must derive from.
        key: the config key that holds ``reference``, for the errors.

    Raises:
        ConfigError: there is no such file or class, the file does not run, or the class is abstract or of another kind.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{key}: {reference}: there is no Python file {file}. Give FILE.py:Class, with the file's path.")
    module_name = f"zerobook_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec and spec.loader
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever a user's code raises
            del sys.modules[module_name]
            raise ConfigError(f"{key}: {file} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not inspect.isclass(found) or not issubclass(found, base):
        own = [n for n, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, base) and c is not base]
        raise ConfigError(
            f"{key}: {file} has no class {name!r} that derives from {base.__module__}.{base.__name__}; it has "
            f"{', '.join(own) or 'none'}."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{key}: {reference} does not define {missing}, which {base.__name__} asks for.")
    return found
