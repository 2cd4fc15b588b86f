"""Settings: options declared once, as the fields of a dataclass, for a constructor, a schema and its YAML file.

The type of a field says which values it takes, and the field's entry in the docstring what they mean::

    @dataclass(frozen=True, kw_only=True)
    class Options:
        '''...

        Args:
            stages: how many; "auto": one for each process.
        '''
        stages: Count | Auto = "auto"

    class Strategy:
        @takes(Options)
        def __init__(self, options: Options) -> None: ...

    Strategy(stages=0)      # ValueError: stages=0: give an integer of at least 1, or 'auto'.

Editors and ``help(Strategy)`` show the constructor with all fields, their types and their defaults.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from datetime import timedelta
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
S = TypeVar("S")

SET_BY_TRAINER: Mapping[str, Any] = types.MappingProxyType({"set_by_trainer": True})  # metadata of such a field


@dataclass(frozen=True, slots=True)
class Range:
    """The limits of a number, both included; None for no upper one."""

    low: float
    high: float | None = None

    def __contains__(self, value: float) -> bool:
        return self.low <= value and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        return f"of at least {self.low:g}" if self.high is None else f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class ByteSize:
    """The texts that :func:`bytes_of` reads."""

    def __contains__(self, text: str) -> bool:
        return _SIZE.fullmatch(text) is not None

    def __str__(self) -> str:
        return "such as '6GiB'"


# What other frameworks call a setting, a word of it, or a schedule; and its name here.
_MEANT = types.MappingProxyType(
    {
        "virtual": "chunks", "pipeline": "stages", "pp": "stages", "tensor": "tensor_parallel", "tp": "tensor_parallel",
        "data": "data_parallel", "dp": "data_parallel", "micro": "microbatches",
        "interleaved1f1b": "interleaved", "zbvzerobubble": "zbv", "zerobubble": "zbv",
    }
)  # fmt: skip


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The one of these names that is meant by another one, of which a letter is wrong or which another framework has;
    None for none."""
    words, names = wrong.lower(), list(known)
    close = difflib.get_close_matches(words, names, n=1, cutoff=0.8)
    meant = [name for word, name in _MEANT.items() if name in names and (word == words or word in words.split("_"))]
    return next(iter([*close, *meant, *difflib.get_close_matches(words, names, n=1)]), None)


_UNITS = types.MappingProxyType({"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40})
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def bytes_of(text: str) -> int:
    """The number of bytes that a text such as ``"6GiB"`` means."""
    found = _SIZE.fullmatch(text)
    assert found is not None, "a setting's value has been checked"
    return int(float(found[1]) * _UNITS[found[2]])


def binary_size(nbytes: int) -> str:
    """Bytes as a text, in units of 1024."""
    unit = next((unit for unit in ("GiB", "MiB") if nbytes >= _UNITS[unit]), "KiB")
    return f"{nbytes / _UNITS[unit]:.3g} {unit}"


Bytes = Annotated[str, ByteSize()]
Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Auto = Literal["auto"]


def fits(value: Any, hint: Any) -> bool:
    """Is ``value`` of the type ``hint``? An int is also a float; a bool is not a number; a str is not a sequence."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return fits(value, args[0]) and value in args[1] and value == value  # NaN is in no range
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin in (list, Sequence):
        return isinstance(value, origin) and not isinstance(value, str) and all(fits(item, args[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(fits(item, args[1]) for item in value.values())
    if origin is Callable or hint is Callable:
        return callable(value)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) != float("inf")
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def described(hint: Any, *, python: bool = False) -> str:
    """The values that a type takes, in words; as Python writes them, or else as YAML does."""
    origin, args = get_origin(hint), get_args(hint)
    words = {
        int: "an integer",
        float: "a number",
        bool: "True or False" if python else "true or false",
        str: "a string",
        type(None): "None" if python else "null",
        timedelta: "a timedelta",
    }
    if origin is Annotated:
        return f"{described(args[0], python=python)} {args[1]}"
    if origin is Literal:
        return " or ".join(repr(choice) if python else str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        # In YAML only these can be written.
        shown = [each for each in args if python or each is not timedelta and get_origin(each) is not Callable]
        return ", or ".join(described(option, python=python) for option in shown)
    if origin in (list, Sequence):
        return f"a list ({described(args[0], python=python)} each)"
    if origin in (dict, Mapping):
        return "a dictionary"
    if origin is Callable:
        return "a function"
    kind = type(None) if hint is None else hint
    return words.get(kind, f"a {getattr(kind, '__name__', kind)}")


def settings_of(options: type) -> Iterator[tuple[Field[Any], Any]]:
    """The fields that a user sets, each with its type, without those that a Trainer fills in."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        if field.metadata != SET_BY_TRAINER:
            yield field, hints[field.name]


def check(options: Any) -> None:
    """Refuse values that don't fit the types of their settings.

    Raises:
        ValueError: it names the setting, its value, and the values that there are.
    """
    for field, hint in settings_of(type(options)):
        value = getattr(options, field.name)
        if not fits(value, hint):
            choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
            close = nearest(value, choices) if isinstance(value, str) else None
            did_you_mean = f" Did you mean {close!r}?" if close else ""
            raise ValueError(f"{field.name}={value!r}: give {described(hint, python=True)}.{did_you_mean}")


def _choices(hint: Any) -> Iterator[Any]:
    """The values that a type names one by one."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            yield from _choices(option)


def takes(options: Callable[P, O]) -> Callable[[Callable[[S, O], None]], Callable[Concatenate[S, P], None]]:
    """Decorator for ``__init__(self, options)``: callers pass the fields of the dataclass ``options`` as keyword
    arguments.

    Raises:
        TypeError: by the constructor, for a keyword that is no field, of which it names the nearest; or for a value
            without a name. What ``options`` raises for a wrong value, the constructor raises too.
    """

    def decorate(init: Callable[[S, O], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def __init__(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
            if args:
                fitting = (field.name for field, hint in settings_of(options) if fits(args[0], hint))  # type: ignore[arg-type]
                example = f"{next(fitting, 'name')}={args[0]!r}"
                raise TypeError(f"{type(self).__name__} takes its settings by their names, as in {example}.")
            unknown = next((name for name in kwargs if name not in parameters), None)
            if unknown is not None:
                close = nearest(unknown, (field.name for field, _ in settings_of(options)))  # type: ignore[arg-type]
                hint = f" Did you mean {close!r}?" if close else ""
                raise TypeError(f"{type(self).__name__} has no setting {unknown!r}.{hint}")
            init(self, options(*args, **kwargs))

        hints = get_type_hints(options)
        taken = inspect.signature(options).parameters
        # A class's own fields come before those of its bases.
        names = dict.fromkeys(name for each in _dataclasses(options) for name in each.__annotations__ if name in taken)
        parameters = {name: taken[name].replace(annotation=hints[name]) for name in names}
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = inspect.Signature([itself, *parameters.values()])  # type: ignore[attr-defined]
        __init__.__doc__ = f"Settings are keyword arguments.\n\nArgs:\n{_arguments(options)}"
        return __init__  # type: ignore[return-value]

    return decorate


def _dataclasses(options: Any) -> list[Any]:
    """A dataclass and its bases, itself first."""
    return [each for each in options.__mro__ if "__dataclass_fields__" in vars(each)]


def _arguments(options: Any) -> str:
    """The entries under "Args:" in the docstrings of a dataclass and of its bases, its own first."""
    sections = []
    for each in _dataclasses(options):
        _, found, entries = inspect.cleandoc(each.__doc__ or "").partition("Args:\n")
        if found:
            lines = entries.split("\n")
            end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
            sections.append("\n".join(lines[:end]).rstrip())
    return "\n".join(sections)
