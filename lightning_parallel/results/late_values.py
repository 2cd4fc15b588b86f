"""Makes stages without the loss wait for it, and for metrics, only where code reads them.

The last stage sends the *outcome* of each of its steps to the other stages, and goes on. They receive it when somebody
reads a value, or some batches later, when it has arrived anyway::

    last stage     step 0, outcome 0 ->  | step 1, outcome 1 ->  | step 2 ...
    other stages   step 0                | step 1                | float(outputs["loss"]): waits for outcome 1
                   a LateLoss              a LateLoss

A stage that has ended its step on a batch has sent all that the last stage needs for its own. So no wait is endless.
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.losses.graph import scalar
from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.posting import posts_directly
from lightning_parallel.private.lightning.metrics import metric_places, replace_metric_places, step_metrics
from lightning_parallel.private.torch.tensors import subclass_functions_disabled, tree_map
from lightning_parallel.ranks.groups import Wire
from lightning_parallel.ranks.run import Run
from lightning_parallel.values import line_outside

_BETWEEN = ("lightning_parallel", "torch", "copy")  # between the reader and a value
_PLACE, _TAG = "outcome", 1 << 20  # a schedule's links count their tags from 0
# Lightning calls these on each loss. They are done when the value is read.
_LATER = ("detach", "clone", "div", "mul")


class LateLoss(Tensor):
    """A step's loss on a stage that isn't the last: a scalar whose value is awaited by any operation on it."""

    value: Callable[[], Tensor]  # the loss as an ordinary tensor, the same one each time

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == Tensor.device.__get__:  # type: ignore[attr-defined]
            with subclass_functions_disabled():
                return function(*args)
        if function.__name__ in _LATER and isinstance(args[0], LateLoss) and not kwargs:
            return _late(args[0], lambda: function(*_read(args)))
        return function(*_read(args), **_read(kwargs or {}))


def _late(like: Tensor, get: Callable[[], Tensor]) -> LateLoss:
    """A loss like this one, whose value is what ``get()`` returns after waiting for it."""
    with subclass_functions_disabled():
        late = like.as_subclass(LateLoss)
    late.value = cache(get)
    return late


def _read(arguments: Any) -> Any:
    return tree_map(lambda each: each.value() if isinstance(each, LateLoss) else each, arguments)


class LateMetrics(dict[str, Any]):
    """Metrics that are brought up to date before they are read. ``update_first`` gets the key, if one is read. Writing
    doesn't wait."""

    def __init__(self, metrics: Any, update_first: Callable[..., None]) -> None:
        super().__init__(metrics)
        self.update_first = update_first

    def __reduce__(self) -> Any:  # copies are plain
        self.update_first()
        return dict, ([*self.items()],)


def _reading(name: str) -> Callable[..., Any]:
    read = getattr(dict, name)

    def reading(self: LateMetrics, *args: Any) -> Any:
        self.update_first(*args[:1])
        return read(self, *args)

    return reading


for _name in (
    *("__getitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__repr__", "__eq__", "__or__", "__ror__"),
    *("get", "keys", "values", "items", "copy", "pop"),
):
    setattr(LateMetrics, _name, _reading(_name))


def _link(run: Run, stage: int, device: torch.device) -> Link:
    """A link to or from a stage, between hosts, for tensors on ``device`` here."""
    peer = run.layout.rank_at(pipeline=stage)
    return Link(Wire(run.groups.host_group, _TAG), peer, run.layout.describe(peer), device)


class Outcomes:
    """The results of the last stage's steps, on all stages of a pipeline.

    Attributes:
        awaited: how many times somebody read a value that had not been received.
    """

    def __init__(self, run: Run) -> None:
        self.awaited = 0
        self._run = run
        self._senders: list[Sender] = []  # on the last stage
        self._receivers: list[Receiver] = []  # one, on the others
        if run.layout.is_last_stage:
            for stage in range(run.layout.stages - 1):
                link = _link(run, stage, run.device)
                self._senders.append(Sender(link, None if link.through_host else posts_directly(link.isend)))
        else:
            self._receivers.append(Receiver(_link(run, run.layout.stages - 1, torch.device("cpu"))))
        self._pending: deque[Future[Tensor]] = deque()  # the losses of steps whose outcomes haven't been received

    def send(self, loss: Tensor) -> None:
        """Send a step's outcome from the last stage. It waits for nothing, not even for a GPU."""
        places = step_metrics(self._run.trainer)
        values = {id(value): value for place in places for value in place.values()}
        index = {key: i for i, key in enumerate(values)}
        names = [{name: index[id(value)] for name, value in place.items()} for place in places]
        text = json.dumps(names).encode()
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        message = [head, *(value.detach() for value in (loss, *values.values()))]
        for sender in self._senders:
            sender.send(message, _PLACE)

    def coming(self) -> LateLoss:
        """The loss of the step that has just run, on the other stages."""
        if not isinstance(metric_places(self._run.trainer)[0], LateMetrics):
            replace_metric_places(self._run.trainer, lambda metrics: LateMetrics(metrics, self._await_all))
        loss: Future[Tensor] = Future()
        self._pending.append(loss)
        (receiver,) = self._receivers
        receiver.expect(_PLACE)
        return _late(torch.full((), torch.nan, device=self._run.device), lambda: self._received(loss))

    # -- on the stages that receive ------------------------------------------------------------------------------

    def _received(self, loss: Future[Tensor]) -> Tensor:
        if not loss.done():
            self._note_wait()
        while not loss.done():
            if not self._pending:
                raise RuntimeError("The run ended before the last stage came to the loss of this step.")
            self._take()
        return loss.result()

    def _await_all(self, *keys: Any) -> None:
        if self._pending:
            self._note_wait()
            self.take(keep=0)

    def take(self, keep: int) -> None:
        """Receive all but the last ``keep`` outcomes of the steps so far, after a batch."""
        for sender in self._senders:
            sender.flush(keep + 1)  # older ones are known to have been received
        while len(self._pending) > keep:
            self._take()

    def _take(self) -> None:
        (receiver,) = self._receivers
        message = receiver.take()
        assert message is not None, "there is no end of outcomes"
        head, loss, *values = message[0]
        names = json.loads(head.numpy().tobytes())
        # As numbers, which the device writes by itself. And no metric is a view of the message.
        result, *own = (scalar(each.item(), each.dtype, self._run.device) for each in (loss, *values))
        self._pending.popleft().set_result(result)
        callback, logged, shown = metric_places(self._run.trainer)
        callback.update({name: own[i] for name, i in names[0].items()})
        logged.update({name: own[i] for name, i in names[1].items()})
        shown.update({name: values[i].item() for name, i in names[2].items()})

    def _note_wait(self) -> None:
        self.awaited += 1
        if self.awaited == 1 and self._run.ahead():
            warnings.warn(
                f"{line_outside(_BETWEEN)} reads the loss or a metric of a step, so this pipeline stage waits for the "
                f"last one there. To keep the stages from waiting for each other, read them once in a while, or under "
                f"`if trainer.is_global_zero:`.",
                stacklevel=2,
            )

    def end(self) -> None:
        """Make the metrics plain dictionaries again. Outcomes that an error has kept from arriving are dropped."""
        self._pending.clear()
        if isinstance(metric_places(self._run.trainer)[0], LateMetrics):
            replace_metric_places(self._run.trainer, dict)
