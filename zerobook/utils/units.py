"""Amounts with units: parsed as users write them (``80GB``, ``1.5TiB``, ``400Gbps``, ``7.5B``), and formatted for users."""

import math
import re
from collections.abc import Callable
from fractions import Fraction

from zerobook.errors import ConfigError

_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_bytes(text: str, key: str) -> int:
    """Return a number of bytes: ``80GB`` is 80 x 10^9, ``80GiB`` is 80 x 2^30.

    Args:
        key: the flag that has this value, for messages.

    Raises:
        ConfigError: no number, no unit, an unknown unit, or an amount of 0.
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([kmgtp]i?|)b\s*", text, re.I)
    # A number with more than 308 digits is infinite as a float.
    if match is None or not math.isfinite(float(match[1])):
        # A number without a unit could mean bytes or GB.
        hint = " Write GB for 10^9 bytes or GiB for 2^30." if re.fullmatch(rf"\s*{_NUMBER}\s*", text) else ""
        raise ConfigError(f"{key}: {text!r} is not an amount of memory such as 80GB, 24GiB or 1.5TB.{hint}")
    # A fraction is exact, and the float 2.01 times 10^9 is below 2010000000.
    amount = int(Fraction(match[1]) * (_DECIMAL | _BINARY)[match[2].lower()])
    if amount <= 0:
        raise ConfigError(f"{key}: {text!r} is zero. Give the amount of memory, such as 80GB.")
    return amount


def parse_rate(text: str, key: str) -> float:
    """Return a number of bytes per second.

    ``400Gbps`` and ``400Gb/s``, with a small b, are bits per second. ``50GBps`` and ``50GB/s`` are bytes per second.

    Args:
        key: the flag that has this value, for messages.

    Raises:
        ConfigError: as in `parse_bytes`, or the rate is written as in ``50gb/s``.
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([kmgtKMGT]?)(bps|b/s|bit/s|Bps|B/s)\s*", text)
    # People write 50gb/s for bits and for bytes, so b/s after a small letter is refused.
    if match is None or not 0 < float(match[1]) < math.inf or (match[2].islower() and match[3] == "b/s"):
        raise ConfigError(f"{key}: {text!r} is not a rate such as 400Gbps (bits a second) or 300GB/s (bytes a second).")
    rate = float(match[1]) * _DECIMAL[match[2].lower()]
    # A capital B stands for bytes, a small one for bits.
    if "B" in match[3]:
        return rate
    return rate / 8


def parse_count(text: str, key: str) -> int:
    """Return a whole number: ``7.5B`` is 7.5 x 10^9.

    Args:
        key: the flag that has this value, for messages.

    Raises:
        ConfigError: no number, an unknown unit, 0, or not a whole number, as ``7.5`` without its B.
    """
    match = re.fullmatch(rf"\s*({_NUMBER}(?:e\d+)?)\s*([kmbt]?)\s*", text, re.I)
    number = Fraction(0)
    if match is not None and float(match[1]) < math.inf:
        number = Fraction(match[1]) * _COUNTS[match[2].lower()]
    if not number or number.denominator != 1:
        raise ConfigError(f"{key}: {text!r} is not a number such as 7.5B, 350M or 7500000000.")
    return int(number)


def with_range(value: float, bounds: tuple[float, float], show: Callable[[float], str]) -> str:
    """Return a value with its range as text. If the bounds are equal, no range is known, and the value stands alone.

    Args:
        show: returns an amount as text, such as `count`.

    >>> with_range(5.0, (4.0, 7.0), count), with_range(90.0, (90.0, 90.0), duration)
    ('5 (4 to 7)', '1 min 30 s')
    """
    low, high = bounds
    return show(value) if low == high else f"{show(value)} ({show(low)} to {show(high)})"


def gb(amount: float) -> str:
    """Return an amount of bytes in units of 10^9, without the unit: ``1.21`` or ``1,210``."""
    return _round_to_three(amount / 1e9)


def size(amount: float) -> str:
    """Return an amount of bytes with the decimal unit that fits: ``1.21 TB``."""
    # 999.5 MB or more would be rounded to 1000 MB, so it is written in GB. The other units are treated likewise.
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= 0.9995 * unit:
            return f"{_round_to_three(amount / unit)} {name}"
    return f"{amount:.0f} B"


def count(number: float) -> str:
    """Return a number with the letter of its magnitude: ``1.56B`` for 1.56 x 10^9."""
    # For 0.9995 see `size`.
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{_round_to_three(number / unit)}{name}"
    return f"{number:.0f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if it is not 1.

    >>> counted(1, "process"), counted(2, "process"), counted(1200, "step"), counted(0, "batch")
    ('1 process', '2 processes', '1,200 steps', '0 batches')
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Return a duration as text: ``3 d 4 h``, ``2 h 5 min``, ``41 s``, ``5.3 s`` or ``20 ms``.

    >>> duration(7512), duration(5.31), duration(0.02)
    ('2 h 5 min', '5.3 s', '20 ms')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    amounts: list[str] = []
    rest = round(seconds)
    for name, unit in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        # Only the two largest units are written.
        if rest >= unit and len(amounts) < 2:
            amounts.append(f"{rest // unit} {name}")
        rest %= unit
    return " ".join(amounts)


def _round_to_three(value: float) -> str:
    """Return a number with three significant figures, or with all figures before the point if there are more."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
