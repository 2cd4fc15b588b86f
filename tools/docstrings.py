"""For ``make docs``: docstrings as Markdown, and strategies with all of their settings.

Roles become code, and a ``::`` before a block goes. A strategy takes the fields of a dataclass, which has some of them
from others: its constructor is shown with all that it takes, under one heading, without what a Trainer fills in.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any, get_type_hints

from griffe import Class, Docstring, Extension, Function, Object, Parameter, ParameterKind, Parameters

from lightning_parallel.settings import described, settings_of

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(?:[^`<]*<)?~?([\w.]+)>?`")
_ENTRY = re.compile(r"^    (\w+): .*(?:\n {8}.*)*", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring, as the site shows it."""
    return re.sub(r"^(.*?):?:$", lambda line: line[1] and f"{line[1]}:", _ROLE.sub(r"`\1`", text), flags=re.MULTILINE)


class Roles(Extension):
    """Rewrites every docstring once it has been read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


class Settings(Extension):
    """Gives a strategy's constructor the settings that it takes, with their types in words."""

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        init = cls.members.get("__init__")
        if not isinstance(init, Function) or not any("takes(" in str(each.value) for each in init.decorators):
            return
        made = getattr(import_module(cls.module.path), cls.name).__init__
        options = get_type_hints(inspect.unwrap(made))["options"]
        hints = {field.name: (hint, field.default) for field, hint in settings_of(options)}
        taken = [name for name in inspect.signature(made).parameters if name in hints]  # its own first
        entries = {found[1]: found[0] for found in _ENTRY.finditer(inspect.getdoc(made) or "")}
        init.parameters = Parameters(
            Parameter("self"),
            *(
                Parameter(
                    name,
                    annotation=described(hints[name][0], python=True),
                    kind=ParameterKind.keyword_only,
                    default=repr(hints[name][1]),
                )
                for name in taken
            ),
        )
        text = "Each is a keyword argument.\n\nArgs:\n" + "\n".join(entries[name] for name in taken)
        init.docstring = Docstring(markdown(text), parent=init, parser="google")
