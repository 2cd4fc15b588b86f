"""Steps that go through the model several times: text is made token by token, each after all that came before it.

In a pipeline a step is cut at the stages' bounds, and only the last stage reaches its end. So such a step says itself
where a pass through the model begins and ends. It is a generator that yields *passes*: functions that call the model
and return a tensor. Only these tensors are exchanged between the stages::

    class MyModule(L.LightningModule):
        @in_passes
        def predict_step(self, tokens, batch_idx):
            for _ in range(100):
                new = yield lambda: self(tokens)[:, -1].argmax(-1)
                tokens = torch.cat([tokens, new[:, None]], dim=1)
            return tokens

Without a pipeline the passes run one after the other. A pipeline runs the generator on every rank and each pass through
the stages, and sends to all what a pass returned on the last one (``steps/several_passes.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

Passes = Generator[Callable[[], Tensor], Tensor, Any]

_GENERATOR = "_generator_of_passes"  # an attribute of the method


def in_passes(step: Callable[..., Passes]) -> Callable[..., Any]:
    """Makes a ``predict_step`` of a generator of passes.

    Args:
        step: a generator method. It yields functions without arguments, which call the model and return a tensor;
            ``yield`` gives back that tensor. At its end it returns the prediction. The code between the passes runs on
            every rank, and has to do the same on all of them.
    """

    @functools.wraps(step)
    def whole(*args: Any, **kwargs: Any) -> Any:
        passes = step(*args, **kwargs)
        try:
            wanted = next(passes)
            while True:
                wanted = passes.send(wanted())
        except StopIteration as end:
            return end.value

    setattr(whole, _GENERATOR, step)
    return whole


def passes_of(step: Callable[..., Any]) -> Callable[..., Passes] | None:
    """The generator of a bound method that :func:`in_passes` has made; None for other steps."""
    generator = getattr(step, _GENERATOR, None)
    return None if generator is None else functools.partial(generator, step.__self__)  # type: ignore[attr-defined]


def first_pass(step: Callable[..., Any]) -> Callable[..., Any]:
    """What runs only the first pass of a step, for a trace of it. A step that isn't :func:`in_passes` is returned as it
    is."""
    passes = passes_of(step)
    if passes is None:
        return step

    @functools.wraps(step)
    def first(*args: Any, **kwargs: Any) -> Any:
        return next(passes(*args, **kwargs))()

    return first
