"""The result of tracing a step (``trace.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_parallel.absent.origins import origin_of, parameter_of

Call = tuple[str, int]  # of a module: its name, and which of its calls in a step


@dataclass(frozen=True)
class TracedCall:
    """A call of a unit.

    Attributes:
        call: the call's number among the unit's calls in the step, from 0.
        needs: the origins of its inputs, and of the parameters of other modules that it reads.
        tensors: the number of tensors in its output.
        operations: the floating-point operations of its forward: those of matrix products and convolutions.
        computed: the bytes of all that it computes: about what its backward needs.
        inside: the modules that its own code calls, by name.
        plain: the numbers and texts in its output, and the shapes of the tensors.
        draws_on_host: it draws from Python's or NumPy's generator.
        direct: it was called by its method ``forward``, past its hooks.
        in_function: it ran inside the forward of an autograd.Function, such as a checkpoint with use_reentrant=True:
            gradients are off there, and are made up for in its backward.
        in_inference: it ran in torch.inference_mode(), whose tensors can't get gradients.
    """

    unit: str
    call: int
    needs: frozenset[str]
    tensors: int
    operations: int
    computed: int
    returned: int
    inside: frozenset[str]
    plain: tuple[Any, ...]
    draws_on_host: bool
    direct: bool
    in_function: bool
    in_inference: bool

    @property
    def key(self) -> Call:
        """The call, as hooks know it."""
        return self.unit, self.call

    @property
    def origin(self) -> str:
        return origin_of(self.unit, self.call)


@dataclass(frozen=True)
class Escape:
    """A value that was computed inside a unit's call, and that code outside can get by a hook or an attribute.

    Attributes:
        within: the index of the unit's call in the trace.
        module: the module whose output it is, or whose own code computed it (the unit, or a module inside), and the
            number of that module's call.
        tensors: the number of tensors in that output; None for a value of the module's own code.
        needs: the origins of that module's inputs.
    """

    within: int
    module: Call
    tensors: int | None
    needs: frozenset[str]


@dataclass(frozen=True)
class Place:
    """Where in a step something happens, relative to the calls of units.

    ::

        code        call 0     hooks of call 0     code        call 1     hooks of call 1     code
        Place(0)    (0, call)  (0, hooks)          Place(1)    (1, call)  (1, hooks)          Place(2)

    Attributes:
        index: the call's index in the trace; for code around the calls, that of the next call.
        during: ``"call"``: inside the unit; ``"hooks"``: in the user's hooks on it, after its forward.
    """

    index: int
    during: Literal["code", "call", "hooks"] = "code"


@dataclass(frozen=True)
class Update:
    """A change in place, by the code around the units, of a unit's parameter or buffer, such as a mean teacher's.

    Attributes:
        place: where it is changed; None outside the step, in a hook around it.
        needs: the origins of what it is computed from.
    """

    name: str
    place: Place | None
    needs: frozenset[str]

    @property
    def by_layers(self) -> bool:
        """Is it computed from what layers return, and not from parameters alone?"""
        return any(parameter_of(origin) is None for origin in self.needs)


@dataclass(frozen=True)
class PlainRead:
    """A value without absent tensors, such as a number, that a unit has stored on a module, and that is read outside
    the unit.

    Attributes:
        module: the name of the module that keeps the value.
        attribute: the attribute's name there; None for the state of a metric.
        is_shared: other units hold the same container or object.
    """

    unit: str
    module: str
    attribute: str | None
    place: Place
    is_shared: bool = False


@dataclass(frozen=True)
class Carried:
    """A value without absent tensors that the code around the units keeps on a module, and that it or a unit reads in
    the next step before it is changed: a count of steps, a list of earlier batches.

    Attributes:
        name: the attribute's name, after its module's.
        is_number: the value is a number, or an array or a tensor of them.
        reads, writes: the places where it is read and changed.
    """

    name: str
    is_number: bool
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]


@dataclass
class Trace:
    """What a step did. It is filled in while the step runs (``recorder.py``, ``dry_run.py``).

    Attributes:
        end: the origins of what the step returned, logged and stored on modules, and of the value that ended the trace,
            if it needed one. What it goes on with then is found by guesses (see :func:`.trace`).
        writes: the indices of the calls that change an input in place, by the origin that it has afterwards.
        overwriting: the indices of calls that change in place a tensor that isn't absent, such as one of the batch.
        updates: the updates of parameters and buffers by the code around the units.
        own_updates: what units change themselves: parameters, as a masked convolution does in its forward, buffers, and
            (only with ``plain_values``) numbers that they read first. True for those that another forward leaves as
            they are then, such as clamped ones.
        counts: the attributes by which a unit's next call differs, such as a count of its calls, or a hidden state.
        draws: a random generator that lives longer than the step was drawn from, other than the default ones.
        plain_reads, carried: found only with ``plain_values``.
        put_back: with ``plain_values`` the attributes, after the names of their modules, that have other contents at
            one of the exits in question, and at the end of the step the old ones: a list that the step empties.
        stopped: the error that ended the step early; None if it came to its end.
        beyond: the units that it goes on to call then.
        stored_after: the exits in question at which the step's own code had stored on modules what it computed from
            what units return; None stands for the end of the step.
    """

    calls: list[TracedCall] = field(default_factory=list)
    end: set[str] = field(default_factory=set)
    escapes: dict[str, Escape] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    overwriting: set[int] = field(default_factory=set)
    updates: list[Update] = field(default_factory=list)
    own_updates: dict[str, bool] = field(default_factory=dict)
    counts: set[str] = field(default_factory=set)
    draws: bool = False
    plain_reads: list[PlainRead] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    put_back: set[str] = field(default_factory=set)
    stopped: Exception | None = None
    stored_after: set[Call | None] = field(default_factory=set)
    beyond: set[str] = field(default_factory=set)

    def sources(self) -> list[set[int]]:
        """For each call, the indices of the calls that compute what it needs, or change it in place."""
        computed_in = {call.origin: i for i, call in enumerate(self.calls)}
        computed_in |= {origin: escape.within for origin, escape in self.escapes.items()} | self.writes
        return [{computed_in[origin] for origin in call.needs & computed_in.keys()} for call in self.calls]
