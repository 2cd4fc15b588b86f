"""Which hooks read what a batch came to: the loss that ``training_step`` returned, or a metric that it logged.

Where stages don't wait for each other between batches, all but the last one don't have it yet. Whether a hook reads it
is told by its code. In doubt it does.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, LambdaCallback, LearningRateFinder
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_parallel.lightning_private import callbacks_of

_METRICS = frozenset({"callback_metrics", "logged_metrics", "progress_bar_metrics"})
_SHARED = _METRICS | {"should_stop"}  # what the stages don't have, or not at the same time
_GETS_LOSS = ("optimizer_step", "on_before_backward")
# Where stages meet: these may read metrics.
_WHERE_STAGES_MEET = ("on_validation", "on_test", "on_predict", "validation_", "test_", "predict_")
_AROUND = frozenset({"setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"})
_AROUND_EPOCHS = frozenset({"on_train_epoch_start", "on_train_epoch_end"})
_LIBRARIES = ("lightning.", "lightning_parallel.", "torch.", "torchmetrics.", "builtins")


def readers(trainer: pl.Trainer, module: pl.LightningModule, schedulers: Iterable[Any] = ()) -> list[str]:
    """The names of what reads a batch's outcome before the stages next meet, each once.

    Args:
        trainer: whose callbacks they are.
        module: of the user.
        schedulers: of the learning rate.
    """
    return [*dict.fromkeys(_readers(trainer, module, schedulers))]


def _readers(trainer: pl.Trainer, module: pl.LightningModule, schedulers: Iterable[Any]) -> Iterator[str]:
    if is_overridden("on_train_batch_end", module) and reads_outcome(type(module).on_train_batch_end, before=1):
        yield f"{type(module).__name__}.on_train_batch_end"
    for hook in _GETS_LOSS:
        if is_overridden(hook, module):
            yield f"{type(module).__name__}.{hook}"
    yield from _naming(module)
    for callback in callbacks_of(trainer):
        yield from _of_callback(callback)
    for scheduler in schedulers:
        yield from _naming(scheduler)
        for function in getattr(scheduler, "lr_lambdas", ()):
            if isinstance(function, FunctionType) and not _SHARED.isdisjoint(_names_in(function.__code__)):
                yield f"a function of {type(scheduler).__name__}"


def _of_callback(callback: Callback) -> Iterator[str]:
    kind = type(callback)
    if isinstance(callback, LearningRateFinder):
        yield kind.__name__
    # What Lightning's checkpoints read is known, and its progress bar is on the last stage.
    known = kind.__module__.startswith(("lightning.pytorch.callbacks.", "lightning_parallel."))
    if known and kind is not LambdaCallback:
        return
    for name, before in (("on_train_batch_end", 3), ("on_before_backward", 3)):
        hook = getattr(callback, name)
        function = getattr(hook, "__func__", hook)
        if function is not getattr(Callback, name) and reads_outcome(function, before - (hook is function)):
            yield f"{kind.__name__}.{name}"
    yield from _naming(callback)


def _naming(thing: object) -> Iterator[str]:
    """The methods of a user's class that name a metric, or the end of the training."""
    for kind in type(thing).__mro__:
        if f"{kind.__module__}.".startswith(_LIBRARIES):
            continue
        for name, value in vars(kind).items():
            if name.startswith(_WHERE_STAGES_MEET) or name in _AROUND | _AROUND_EPOCHS:
                continue
            for function in _functions(value):
                if not _SHARED.isdisjoint(_names_in(function.__code__)):
                    yield f"{kind.__name__}.{name}"


def _functions(value: Any) -> Iterator[FunctionType]:
    """Those of a method, with what decorators have wrapped."""
    if isinstance(value, property):
        yield from (each for part in (value.fget, value.fset) for each in _functions(part))
    function = getattr(value, "__func__", value)
    while function is not None:
        if isinstance(function, FunctionType):
            yield function
        function = getattr(function, "__wrapped__", None)


def _names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals, inner functions' too."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names}.union(*inner)


def reads_outcome(function: Callable[..., Any], before: int) -> bool:
    """Does a hook use its argument ``outputs`` or one after it, or a metric, or code that it doesn't show and that may?

    Args:
        function: of the hook.
        before: the number of arguments before ``outputs``, ``self`` included; the last of them is the module.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return True
    code = function.__code__
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    first = [p.name for p in parameters if p.kind not in kinds][:before]
    outcome = {p.name for p in parameters} - {*first}
    known = {*first[-1:]} if len(first) == before else set()
    trainer = {*first[-2:-1]} if before > 1 else set()
    if not _METRICS.isdisjoint(_names_in(code)) or not (outcome | known | trainer).isdisjoint(code.co_cellvars):
        return True
    return any(_reads(step, after, outcome, known, trainer) for step, after in _loads(code))


def _loads(code: CodeType) -> Iterator[tuple[str, list[dis.Instruction]]]:
    """Each load of a local variable, by its name, with what follows it."""
    steps = [*dis.get_instructions(code)]
    for i, step in enumerate(steps):
        if "LOAD_FAST" in step.opname:  # of pairs, too, which newer versions of Python have
            *others, last = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            yield from ((name, []) for name in others)
            yield last, steps[i + 1 : i + 3]


def _reads(name: str, after: list[dis.Instruction], outcome: set[str], module: set[str], trainer: set[str]) -> bool:
    """Of the Trainer, attributes and methods are harmless (metrics have been looked for). A module's methods may be the
    user's, and read anything."""
    if name in outcome:
        return True
    if name in trainer:
        return not _is_attribute(after)
    if name in module:
        is_trainer = _is_attribute(after) and after[0].argval == "trainer"
        return not _is_attribute(after) or _is_method(after[0]) or (is_trainer and not _is_attribute(after[1:]))
    return False


def _is_attribute(after: list[dis.Instruction]) -> bool:
    return bool(after) and after[0].opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")


def _is_method(step: dis.Instruction) -> bool:
    """Is it called? From Python 3.12 on, a flag says so."""
    flagged = sys.version_info >= (3, 12) and step.arg is not None and bool(step.arg & 1)
    return step.opname == "LOAD_METHOD" or flagged
