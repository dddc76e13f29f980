"""Messages between processes: JSON, so that a message is data and never code.

The store of a launch (torch.distributed's store of keys and values) has no password, and listens on every interface of the
first host. So whoever reaches its port can write any value under any key. `read` therefore limits the size of a value and
checks its type.
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

# Size of the largest message between ranks.
MOST_BYTES = 1 << 30
# Size of the largest value that is read from a store.
MOST_BYTES_IN_STORE = 1 << 20
# A JSON object with this key stands for a value of a type that JSON does not have. The key's value is the type.
_TAG = "$"


class MessageError(ZerobookError):
    """A message that is not what the other processes of a run send."""


# --- values of a few types, between ranks


def encode(value: object) -> bytes:
    """Return ``value`` as JSON.

    Args:
        value: None, a bool, a number, a string, a path, a dtype of torch, an exception, or a list, tuple or dict of these.

    Raises:
        TypeError: it is or contains a value of another type. Send values of these types, and let the receiver build the object.
    """
    return json.dumps(_to_json_types(value)).encode()


def decode(data: bytes) -> Any:
    """Return the value of which `encode` made ``data``.

    Raises:
        MessageError: ``data`` was not made by `encode`.
    """
    try:
        return _from_json_types(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise MessageError(f"{_refusal(data)}: {type(error).__name__}") from None


# Return ``value`` in the types of JSON. A value of another type becomes an object such as {"$": "path", "value": "/tmp"}.
def _to_json_types(value: object) -> object:
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json_types(item) for item in value]
    # A named tuple is refused below, since it would arrive as a plain tuple.
    if type(value) is tuple:
        return {_TAG: "tuple", "value": [_to_json_types(item) for item in value]}
    if isinstance(value, dict):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _to_json_types(item) for key, item in value.items()}
        # The keys of a JSON object are strings, so another dict becomes a list of pairs.
        return {_TAG: "dict", "value": [[_to_json_types(key), _to_json_types(item)] for key, item in value.items()]}
    if isinstance(value, Path):
        # In a name that is not UTF-8, Python has lone surrogates for the other bytes. JSON can escape these.
        return {_TAG: "path", "value": os.fspath(value)}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, Exception):
        return {_TAG: "error", "value": _describe_error(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


# The reverse of `_to_json_types`.
def _from_json_types(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_from_json_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _from_json_types(item) for key, item in value.items()}
    kind = value[_TAG]
    content = value["value"]
    if kind == "tuple":
        return tuple(_from_json_types(item) for item in content)
    if kind == "dict":
        return {_from_json_types(key): _from_json_types(item) for key, item in content}
    if kind == "path":
        return Path(content)
    if kind == "dtype":
        dtype = getattr(torch, content)
        # The name comes from another process, and may be that of any attribute of torch.
        if isinstance(dtype, torch.dtype):
            return dtype
    if kind == "error":
        return _restore_error(**content)
    raise ValueError(kind)


# Return the arguments with which `_restore_error` makes such an error again.
def _describe_error(error: Exception) -> dict[str, Any]:
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
    """Return an error of another process, as `_describe_error` describes it.

    An error without an errno whose class is not Zerobook's becomes a `RuntimeError`.

    Args:
        kind: name of the error's class.
        problems: of a `ConfigError`.
        number: errno of an `OSError`; None for other errors.
    """
    if number is not None:
        return OSError(number, text, file)
    for error_class in _subclasses(ZerobookError):
        if error_class.__name__ != kind:
            continue
        # Do not call `__init__`, which may need other arguments than the text.
        error = error_class.__new__(error_class)
        error.args = (str(text),)
        if isinstance(error, ConfigError):
            error.problems = [str(problem) for problem in problems or [text]]
        return error
    return RuntimeError(f"{kind}: {text}")


def _subclasses(base: type[ZerobookError]) -> list[type[ZerobookError]]:
    """Return ``base`` and all classes that derive from it, directly or not, in the modules that are imported."""
    classes = [base]
    for derived in base.__subclasses__():
        classes += _subclasses(derived)
    return classes


# --- values of one type, through a store
# Pydantic's adapter of a type takes long to make, so it is made once for each type.
_make_adapter = cache(TypeAdapter)


def read(data: bytes | str, kind: Any) -> Any:
    """Return the value of type ``kind`` that is written as JSON in ``data``, which comes from a store.

    Args:
        kind: a type that pydantic can check. A value of another type is not converted to it.

    Raises:
        MessageError: ``data`` holds something else, or is larger than `MOST_BYTES_IN_STORE`.
    """
    # Check the size before parsing, which takes time and memory.
    if len(data) > MOST_BYTES_IN_STORE:
        raise MessageError(_refusal(data))
    try:
        # Pydantic's parser refuses JSON that is nested deeply, for which Python's would raise a RecursionError.
        return _make_adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise MessageError(f"{_refusal(data)}: {error.errors()[0]['msg']}") from None


# Return the message for data that no process of this run has sent.
def _refusal(data: bytes | str) -> str:
    return (
        f"a message of {len(data)} bytes is not one of this run. Does another program use the launch's port? Ports of a launch "
        "need a network without strangers: docs/guides/multi_node.md"
    )


class SignedStore:
    """A store with signed values, so that values which another program has written through the store's port are recognised.

    Another program can still delete values.

    Args:
        secret: a text that only the processes of the run know. It must not be sent through the store.
    """

    def __init__(self, store: Store, secret: str):
        self._store = store
        self._secret = secret.encode()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sign(key, value.encode()).decode() + value)

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; an empty one if it is not signed with the secret. This holds for `multi_get` too."""
        return self._verify(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(self._verify, keys, self._store.multi_get(list(keys))))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    # Return the value in ``data``, which is a signature and a value; an empty one if the signature is not of this secret.
    def _verify(self, key: str, data: bytes) -> bytes:
        # A signature has two hexadecimal digits for each byte of the hash.
        length = 2 * hashlib.sha256().digest_size
        signature = data[:length]
        value = data[length:]
        # compare_digest takes the same time for every signature, so nobody can guess one byte by byte.
        return value if hmac.compare_digest(signature, self._sign(key, value)) else b""

    def _sign(self, key: str, value: bytes) -> bytes:
        # The key is signed too, so that nobody can write the heartbeat of one rank under the key of another.
        return hmac.new(self._secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest().encode()
