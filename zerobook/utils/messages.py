"""Messages between processes: JSON, so that a message is data and never code.

The store of a launch has no password, and listens on every interface of the first host. So whoever reaches its port can
write any value under any key. What is read there is bounded in size and checked against a type.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from zerobook.errors import ConfigError, ZerobookError

if TYPE_CHECKING:
    from torch.distributed import Store

MOST_BYTES = 1 << 30
"""Size of the largest message between ranks."""
MOST_BYTES_IN_STORE = 1 << 20
"""Size of the largest value that is read from a store."""
_TAG = "$"
"""Key of a JSON object that stands for something that JSON has no type for."""


class MessageError(ZerobookError):
    """A message that is not what the other processes of a run send."""


# --- values of any of a few types, between ranks


def encode(value: object) -> bytes:
    """Return ``value`` as JSON.

    Args:
        value: None, a bool, a number, a string, a path, a dtype of torch, an exception, or a list, tuple or dict of these.

    Raises:
        TypeError: it is or holds something else. Send plain values, and build the object where they arrive.
    """
    return json.dumps(_tagged(value)).encode()


def decode(data: bytes) -> Any:
    """Return the value that `encode` made ``data`` of.

    Raises:
        MessageError: ``data`` is something else.
    """
    try:
        return _untagged(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise MessageError(f"{_refusal(data)}: {type(error).__name__}") from None


def _tagged(value: object) -> object:
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    # A named tuple would arrive as a plain one, so it is refused.
    if type(value) is tuple:
        return {_TAG: "tuple", "value": [_tagged(item) for item in value]}
    if isinstance(value, dict):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _tagged(item) for key, item in value.items()}
        # JSON has keys of text only.
        return {_TAG: "dict", "value": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if isinstance(value, Path):
        # JSON escapes a name that is no UTF-8, which Python has in half surrogate pairs.
        return {_TAG: "path", "value": os.fspath(value)}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, Exception):
        return {_TAG: "error", "value": _facts_of_error(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def _untagged(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _untagged(item) for key, item in value.items()}
    kind = value[_TAG]
    content = value["value"]
    if kind == "tuple":
        return tuple(_untagged(item) for item in content)
    if kind == "dict":
        return {_untagged(key): _untagged(item) for key, item in content}
    if kind == "path":
        return Path(content)
    if kind == "dtype":
        dtype = getattr(torch, content)
        # The text comes from another process, and may name anything of torch.
        if isinstance(dtype, torch.dtype):
            return dtype
    if kind == "error":
        return _restore_error(**content)
    raise ValueError(kind)


def _facts_of_error(error: Exception) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, ConfigError):
        facts["problems"] = error.problems
    elif isinstance(error, OSError) and error.errno is not None:
        facts |= {
            "number": error.errno,
            "text": error.strerror,
            "file": None if error.filename is None else str(error.filename),
        }
    return facts


def _restore_error(
    kind: str, text: str, problems: list[str] | None = None, number: int | None = None, file: str | None = None
) -> Exception:
    """Return the error of another process, from `_facts_of_error`. An error of an unknown class becomes a `RuntimeError`."""
    # Only an error of the operating system has a number.
    if number is not None:
        return OSError(number, text, file)
    for error_class in _subclasses(ZerobookError):
        if error_class.__name__ != kind:
            continue
        # Do not call `__init__`: the class may make its text from other arguments, which are not known here.
        error = error_class.__new__(error_class)
        error.args = (str(text),)
        if isinstance(error, ConfigError):
            error.problems = [str(problem) for problem in problems or [text]]
        return error
    return RuntimeError(f"{kind}: {text}")


def _subclasses(kind: type[ZerobookError]) -> list[type[ZerobookError]]:
    """Return the class and all that derive from it, in this process."""
    classes = [kind]
    for derived in kind.__subclasses__():
        classes += _subclasses(derived)
    return classes


# --- values of one type, through a store
_adapter = cache(TypeAdapter)
"""Makes pydantic's adapter of a type, once for each type."""


def read(data: bytes | str, kind: Any) -> Any:
    """Return the value of type ``kind`` that JSON from a store holds.

    Args:
        kind: any type that pydantic knows; values are not converted to it.

    Raises:
        MessageError: it holds something else, or it is larger than `MOST_BYTES_IN_STORE`.
    """
    # Check the size before anything is parsed.
    if len(data) > MOST_BYTES_IN_STORE:
        raise MessageError(_refusal(data))
    try:
        # Pydantic's parser refuses what is nested deeply.
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise MessageError(f"{_refusal(data)}: {error.errors()[0]['msg']}") from None


def _refusal(data: bytes | str) -> str:
    return (
        f"a message of {len(data)} bytes is not one of this run. Does another program use the launch's port? Ports of a launch "
        "need a network without strangers: docs/guides/multi_node.md"
    )


class SignedStore:
    """A store whose values carry a signature, so that those of a stranger who reaches its port are told apart.

    It protects a value from being made up, not from being deleted.

    Args:
        secret: known to the processes of the run; it must not be sent through the store.
    """

    def __init__(self, store: Store, secret: str):
        self._store = store
        self._secret = secret.encode()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._signature(key, value.encode()).decode() + value)

    def get(self, key: str) -> bytes:
        """Return the value; empty if it is not signed with the secret."""
        return self._verified(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(self._verified, keys, self._store.multi_get(list(keys))))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def _verified(self, key: str, data: bytes) -> bytes:
        length = 2 * hashlib.sha256().digest_size
        signature = data[:length]
        value = data[length:]
        # In constant time, so that a stranger cannot guess a signature byte by byte.
        return value if hmac.compare_digest(signature, self._signature(key, value)) else b""

    def _signature(self, key: str, value: bytes) -> bytes:
        # The key is signed too, so that the heartbeat of one rank cannot be used as that of another.
        return hmac.new(self._secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest().encode()
