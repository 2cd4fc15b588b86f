"""For ``make docs``: docstrings as Markdown. Roles become code, and a ``::`` before a block goes."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(?:[^`<]*<)?~?([\w.]+)>?`")


class Roles(Extension):
    """Rewrites every docstring once it has been read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(
                r"^(.*?):?:$", lambda line: line[1] and f"{line[1]}:", text, flags=re.MULTILINE
            )
