"""The origins of absent tensors, what they are computed from, in words that errors can show.

::

    parameter 'embed.weight'                  a parameter or buffer
    the output of 'blocks.1' (call 2)         what a unit's second call returns
    a value inside 'blocks.1'                 what its own code computes from its inputs
    what 'blocks.1' computes from parameters  what its own code computes from its parameters alone: a penalty
    what 'blocks.1' changes in place          an input that the unit writes to

Origins are compared, and :func:`parameter_of` reads a name back, so all are made here.
"""

from __future__ import annotations

from functools import lru_cache

FROM_EARLIER_STEP = "what an earlier step has stored on a module"
METRIC_STATE = "the state of a metric before the step"
STEP_OUTPUT = "what the step returns"  # in the module's hooks around it
INPUT = "an input"  # of a module that is asked by itself


@lru_cache(4096)  # each absent layer asks in each microbatch
def origin_of(module: str, call: int = 0) -> str:
    """The origin of the output of a module's call, counted from 0."""
    return f"the output of {_numbered(module, call)}"


def origin_of_parameter(name: str) -> str:
    """The origin that is a parameter or buffer."""
    return f"parameter '{name}'"


def parameter_of(origin: str) -> str | None:
    """The name of the parameter or buffer that an origin is; None for other origins."""
    before, _, after = origin_of_parameter("*").partition("*")
    return origin[len(before) : -len(after)] if origin.startswith(before) else None


def inside_of(module: str, call: int) -> str:
    """The origin of a value that a module's own code computes from its inputs."""
    return f"a value inside {_numbered(module, call)}"


def from_parameters(module: str, call: int) -> str:
    """The origin of a value that a module's own code computes from its parameters alone."""
    return f"what {_numbered(module, call)} computes from parameters"


def changed_by(module: str, call: int) -> str:
    """The origin of an input that a module's call writes to."""
    return f"what {_numbered(module, call)} changes in place"


def shared_with(module: str, call: int) -> str:
    """The origin of a tensor that has changed because it shares memory with one that a module's call has returned."""
    return f"what shares memory with an output of {_numbered(module, call)} and is changed in place"


def _numbered(module: str, call: int) -> str:
    return f"'{module}'" + (f" (call {call + 1})" if call else "")
