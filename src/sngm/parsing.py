"""Parsing of names with settings, such as ``sngm(weight_decay=8e-4)``, and of lists of numbers."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UsageError

Settings = dict[str, Any]


def value_of(text: str) -> Any:
    """Parse a Python literal: a number, True, False, None, a quoted string or a tuple of these; else return the text.

    >>> value_of("8e-4"), value_of("true"), value_of("tensor"), value_of("(0.5, 1)")
    (0.0008, True, 'tensor', (0.5, 1))
    """
    text = text.strip()
    if text.lower() in ("true", "false", "none"):
        text = text.capitalize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings of text such as "\d" or 1or
            value = ast.literal_eval(text)
        return value if _is_plain(value) else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # TypeError: unhashable, as in {[]: 1}
        return text


def _is_plain(value: Any) -> bool:
    """Return whether JSON can represent a value: it contains no sets, bytes, complex numbers or Ellipsis."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(of) for key, of in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def parse_settings(pairs: list[str]) -> Settings:
    """Parse ``['momentum=0.9', 'scope=tensor']`` into a dict; raise UsageError if a key repeats."""
    settings: Settings = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key) or not text.strip():
            raise UsageError(f"expected key=value, got {pair!r}")
        if key in settings:
            raise UsageError(f"{key} is set twice")
        settings[key] = value_of(text)
    return settings


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets and quotes.

    >>> split_list('msgd, sngm(weight_decay=8e-4,scope=tensor)')
    ['msgd', 'sngm(weight_decay=8e-4,scope=tensor)']
    """
    parts, depth, least, quote, start = [], 0, 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
            least = min(least, depth)
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts = [part.strip() for part in [*parts, text[start:]]]
    if depth or least or quote or not all(parts):
        raise UsageError(f"expected a list separated by commas, with brackets and quotes closed, got {text!r}")
    return parts


def parse_call(text: str) -> tuple[str, Settings]:
    """Parse a name with settings.

    >>> parse_call("sngm(weight_decay=8e-4, scope=tensor)")
    ('sngm', {'weight_decay': 0.0008, 'scope': 'tensor'})
    >>> parse_call("torch.optim:RMSprop")
    ('torch.optim:RMSprop', {})
    """
    match = re.fullmatch(r"\s*([^\s(),=]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if not match:
        raise UsageError(f"expected a name or name(key=value, ...), got {text!r}")
    inside = (match[2] or "").strip()
    return match[1], parse_settings(split_list(inside)) if inside else {}


def format_call(name: str, settings: Settings) -> str:
    """Format a name with settings: the inverse of :func:`parse_call`.

    >>> format_call("sngm", {"weight_decay": 0.0008, "scope": "tensor"})
    'sngm(weight_decay=0.0008,scope=tensor)'
    """
    if not settings:
        return name
    return f"{name}({','.join(f'{k}={v}' for k, v in settings.items())})".replace(", ", ",")


def sorted_label(label: str) -> str:
    """Return the label of a method with its settings in alphabetical order. Labels of older versions are not sorted.

    >>> sorted_label("sngm(scope=tensor,momentum=0.8)")
    'sngm(momentum=0.8,scope=tensor)'
    """
    name, bracket, rest = label.partition("(")
    try:
        return f"{name}({','.join(sorted(split_list(rest.removesuffix(')'))))})" if bracket else label
    except UsageError:  # the record was edited, and this is not a valid label
        return label


def set_flags(method: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    """Return the ``--set`` flags of ``sngm train`` for settings of the method and of the task.

    Lists become tuples, because JSON stores tuples as lists.

    >>> set_flags({"betas": [0.8, 0.95], "width": 2}, {"width": 8})
    ['--set', 'betas=(0.8, 0.95)', '--set', 'method.width=2', '--set', 'task.width=8']
    """
    named = [("method.", method, task), ("task.", task, method)]
    pairs = [(place * (key in other) + key, value) for place, own, other in named for key, value in own.items()]
    values = [f"{key}={tuple(value) if isinstance(value, list) else value}" for key, value in pairs]
    return [word for value in values for word in ("--set", value)]


def without_settings(label: str, names: Iterable[str]) -> str:
    """Return the label of a method without the settings in `names`.

    >>> without_settings("sngm(weight_decay=0.001,scope=tensor)", ["weight_decay"])
    'sngm(scope=tensor)'
    """
    name, settings = parse_call(label)
    return format_call(name, {key: value for key, value in settings.items() if key not in names})


def numbers(option: str, text: str, *, zero: bool = False) -> list[float]:
    """Parse a list of positive numbers; `zero` also allows 0."""
    found = []
    for word in split_list(text):
        try:
            value = float(word)
        except ValueError:
            raise UsageError(f"{option} wants numbers separated by commas, got {word!r}") from None
        if not 0 < value < float("inf") and not (zero and value == 0):
            raise UsageError(f"{option} wants {'numbers of at least 0' if zero else 'positive numbers'}, got {word}")
        found.append(value)
    return found


def whole_numbers(option: str, text: str) -> list[int]:
    """Parse a list of positive whole numbers."""
    found = numbers(option, text)
    if any(value != int(value) for value in found):
        raise UsageError(f"{option} wants whole numbers, got {text}")
    return [int(value) for value in found]


def numbers_by_name(option: str, text: str) -> list[float] | dict[str, list[float]]:
    """Parse a list of positive numbers, or such lists by name.

    >>> numbers_by_name("--lrs", "0.1,0.3"), numbers_by_name("--lrs", "sngm=0.1,0.3; adamw=1e-3")
    ([0.1, 0.3], {'sngm': [0.1, 0.3], 'adamw': [0.001]})
    """
    if "=" not in text:
        return numbers(option, text)
    found: dict[str, list[float]] = {}
    for part in text.split(";"):
        name, equals, some = part.rpartition("=")  # at the last "=", because settings in parentheses contain "=" too
        if not equals or not name.strip() or not some.strip() or name.strip() in found:
            raise UsageError(f"{option} wants name=numbers for each method once, separated by semicolons, got {part!r}")
        found[name.strip()] = numbers(option, some)
    return found
