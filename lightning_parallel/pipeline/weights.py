"""Decides which version of the weights a microbatch runs with.

A synchronous schedule has one version of the weights between two steps: the module's own. An asynchronous one steps
while microbatches are in flight, whose backward must not see the new weights (:class:`WeightVersions`)::

    update       ----- 0 ------- 1 ------- 2 ------->
    forward 3    uses version 1                        its leaves share memory with the parameters,
    step 1                      the parameters move to a copy, and the optimizer changes the copy
    backward 3                            uses version 1, kept alive by the leaves

A microbatch's forward runs on *leaves*: detached tensors that share the parameters' memory. A step that finds a version
in flight first moves the parameters (``p.data = p.data.clone()``), so the optimizer's in-place update leaves the
version whole. That is one copy for each update and none for each microbatch. Other ways fail, most of them silently:
replacing only ``p.data`` gives wrong input gradients in most kinds of layers (Linear is an exception).

With a correction (``staleness.py``) the leaves have memory of their own, since they hold other values than the
parameters: one copy more than without.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from lightning_parallel.gradients.swapping import gradients_apart
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.pipeline.staleness import Stashing, extrapolate
from lightning_parallel.private.torch.modules import places_of
from lightning_parallel.private.torch.tensors import copy_all
from lightning_parallel.tensor_lists import added, alike, copied, is_one, multiply
from lightning_parallel.values import changed

Half: TypeAlias = Literal["whole", "first", "second"]  # of a backward


@dataclass(eq=False)
class Version:
    """One version of the weights, as the microbatches of one batch read it.

    Attributes:
        updates: the number of updates that made it.
        batch: whose microbatches read it.
        leaves: by parameter name, the tensors that forwards of this version read. Gradients accumulate in the leaves'
            ``grad``.
        copied: the names of the leaves that have memory of their own. Others share the parameters'.
        lender: the version of an earlier chunk whose memory some of the leaves share.
        in_flight: the number of forwards whose backward hasn't run.
    """

    updates: int
    batch: int
    leaves: dict[str, Tensor]
    copied: set[str]
    lender: Version | None = None
    in_flight: int = 0


class WeightVersions:
    """Weight stashing (PipeDream, SOSP 2019), two versions (PipeDream-2BW, ICML 2021) or none, for one chunk.

    A stage's two chunks have versions each, since they update by themselves. A parameter of both belongs to the earlier
    one, whose gradients are complete last. The later chunk borrows it: it reads the earlier one's newest version on
    leaves of its own, and what it adds to an update's gradient is handed over when its own are taken.

    Args:
        module: the partitioned module. Its parameters are swapped for leaves while a step runs.
        parameters: the chunk's own parameters, by name.
        stashing: ``"stash"``: a forward uses the newest weights, and its backward the same ones. ``"2bw"``: likewise,
            but the forwards of update u use the version after u - 1 updates, which every stage has by then.
            ``"latest"``: a backward multiplies with the newest weights, but uses the activations of the forward. This
            needs no copies, and the gradient is biased.
        corrected: whether :meth:`update` will be given corrections.
        grown: called with the name of a parameter whenever a backward has added to its :meth:`gradient`.
        lender: the versions of the earlier chunk.
        borrowed: the parameters of that one which this chunk reads too.

    Attributes:
        updates: the number of updates done, which is also the number of the newest version.
        staleness: for each number of updates between a forward and its backward, the number of microbatches.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        stashing: Stashing = "stash",
        *,
        corrected: bool = False,
        grown: Callable[[str], None] | None = None,
        lender: WeightVersions | None = None,
        borrowed: Collection[str] = (),
    ) -> None:
        self._parameters = dict(parameters)
        self._grown = grown
        self._stashing = stashing
        self._corrected = corrected
        self._lender, self._borrowed = (lender, borrowed) if borrowed else (None, ())
        self.updates = 0
        self._drained = 0  # the version at the last drain: nothing reads an older one
        self._wanted: int | None = None  # the version that forwards read; None for the newest
        self._batch = 0  # whose forwards run
        self._current: Version | None = None
        self._old: list[Version] = []  # older ones: in flight, or yet to be read
        self._loss = BatchLoss([1])  # of the batch whose backwards were completed last
        self._ending: Version | None = None  # that the last of them read
        self._open = 0  # the first batch that hasn't ended
        self._ended: dict[str, Tensor] = {}  # gradients of the update's batches that have ended
        self._lent: deque[dict[str, Tensor]] = deque()  # by update, gradients that a later chunk has handed over
        self.staleness: Counter[int] = Counter()
        read = dict(parameters)
        if self._lender is not None:
            read |= {name: self._lender._parameters[name] for name in borrowed}
        self._places = places_of(module, {id(parameter): name for name, parameter in read.items()})

    @property
    def trains(self) -> bool:
        """Is one of the chunk's own parameters trained?"""
        return any(parameter.requires_grad for parameter in self._parameters.values())

    @property
    def reading(self) -> int:
        """The number of the version that the next forward reads."""
        return self.updates if self._wanted is None else self._wanted

    # -- forwards and backwards ----------------------------------------------------------------------------------

    def begin(self, update: int, batch: int = 0) -> None:
        """Let the next forwards be those of ``update`` and of ``batch``, both counted from 0. Gradients of batches are
        kept apart, since a batch's backwards may begin before the last one's second halves have run."""
        self._batch = batch
        if self._stashing == "2bw":
            self._wanted = max(update - 1, self._drained)

    def forward(self, step: Callable[[], Any]) -> tuple[Any, Version]:
        """Run ``step`` on the leaves of the version that is to be read."""
        version = self._to_read()
        assert version.updates == self.reading, "2bw reads a version that every stage has by now"
        with self._read_from(version):
            result = step()
        self._count_in_flight(version, 1)
        return result, version

    @contextmanager
    def backward(
        self, version: Version, loss: BatchLoss | None = None, half: Half = "whole", *, ends_batch: bool = False
    ) -> Iterator[None]:
        """A context for the backward of a forward that read ``version``, or for a half of it, of which the second one
        reads the version's memory alone.

        Args:
            loss: the whole batch's.
            ends_batch: no other backward of the batch follows.
        """
        if half != "first":
            self._loss, self._ending = loss or self._loss, version
        # Activation checkpointing runs parts of the forward again here, and has to find the same weights.
        reading = nullcontext() if half == "second" else self._read_from(version)
        with reading, gradients_apart(version.leaves.values()):
            yield
        if half != "first":
            self._count_in_flight(version, -1)
            self.staleness[self.updates - version.updates] += 1
            if ends_batch:
                self._end_batch()

    @staticmethod
    def _count_in_flight(version: Version, change: int) -> None:
        version.in_flight += change
        if version.lender is not None:
            version.lender.in_flight += change

    def _read_from(self, version: Version) -> AbstractContextManager[None]:
        return changed([(store, key, version.leaves[name]) for store, key, name in self._places])

    # -- gradients -----------------------------------------------------------------------------------------------

    def gradient(self, name: str) -> Tensor:
        """A parameter's gradient so far, in the last backward of an update. It must have one. It may be in the memory
        of a leaf's ``grad``, to which it is added up, so it isn't to be changed."""
        assert self._ending is not None, "called in a backward"
        own = dict.fromkeys(v.leaves[name] for v in self._versions() if v.batch == self._ending.batch)
        (_, gradient), *newer = [(leaf, leaf.grad) for leaf in own if leaf.grad is not None]
        for leaf, more in newer:  # without a sum of its own, which would stay until its message is sent
            gradient.add_(more)
            leaf.grad = None
        factor = self._loss.factor
        if not is_one(factor):
            gradient = gradient * factor
        return gradient + self._ended[name] if name in self._ended else gradient

    def _end_batch(self) -> None:
        """End the batch whose backwards have run last, all of them: its gradients get the factor of its loss."""
        if self._ending is None:
            return
        batch = self._ending.batch
        grown: dict[str, Tensor] = {}  # summed over versions
        for version in self._versions():
            own: dict[str, Tensor] = {}
            for name, leaf in version.leaves.items() if version.batch == batch else ():
                if leaf.grad is not None:
                    own[name], leaf.grad = leaf.grad, None
            grown = added(grown, own)
        multiply([*grown.values()], self._loss.factor)
        self._ended = added(self._ended, grown)
        self._open = batch + 1
        self._old = [version for version in self._old if self._is_needed(version)]

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the batches since the last call, by the names of the chunk's own parameters. All these
        batches have ended. A parameter that the loss didn't depend on is missing."""
        self._end_batch()
        gradients, self._ended = self._ended, {}
        if self._lender is not None:
            self._lender._lent.append({n: gradients.pop(n) for n in self._borrowed if n in gradients})
        return added(gradients, self._lent.popleft()) if self._lent else gradients

    # -- updates -------------------------------------------------------------------------------------------------

    def update(self, apply: Callable[[], None], correction: float = 0.0, second_order: bool = False) -> None:
        """Let ``apply``, the optimizer's step, change the parameters in place. Versions in flight stay whole.
        ``correction`` and ``second_order`` give the weights that forwards read afterwards
        (:func:`~.staleness.extrapolate`)."""
        assert self._corrected or not correction
        # With a correction or "2bw" the newest version will be read, or written to.
        current = self._newest() if self._corrected or self._stashing == "2bw" else self._current
        newest = [version for version in self._versions() if version.updates == self.updates]  # with common memory
        read: dict[str, Tensor] | None = None
        if current is not None:
            if second_order:
                read = {name: current.leaves[name].data for name in current.copied}
            stays = any(version.in_flight > 0 for version in newest) or self._stashing == "2bw"
            apart = self._corrected if self._stashing == "latest" else stays
            data = self._data() if apart else {}
            moved = copied({name: values for name, values in data.items() if name not in current.copied})
            for name, copy in moved.items():
                self._parameters[name].data = copy
            for version in newest:
                version.copied |= moved.keys()
            self._old.append(current)
        self._current = None
        corrects = self._corrected and correction > 0
        before = copied(self._data()) if corrects else {}
        apply()
        self.updates += 1
        if self._wanted is not None:  # the forwards of the update that was made have run
            self._wanted = max(self._wanted, self.updates - 1)
        self._old = [version for version in self._old if self._is_needed(version)]
        if corrects:
            self._extrapolate(before, read, correction)
            if self._stashing == "latest":  # written to what versions in flight read
                assert current is not None
                leaves = {name: current.leaves[name].data for name in before}
                for targets, values in alike([*leaves.values()], [*before.values()]):
                    copy_all(targets, values)
                before = leaves
            self._current = self._version(before)

    def _extrapolate(self, before: Mapping[str, Tensor], read: Mapping[str, Tensor] | None, weight: float) -> None:
        """Turn copies of the parameters from ``before`` the update, in place, into what forwards are to read.

        Args:
            read: what forwards have read so far where it wasn't the parameters; None for error feedback.
            weight: the chunk's mean staleness in updates.
        """
        now = [self._parameters[name].data for name in before]
        were_read = [(read or before).get(name, values) for name, values in before.items()]
        for group, after, so_far in alike([*before.values()], now, were_read):
            extrapolate(group, after, None if read is None else so_far, weight)

    def refresh(self) -> None:
        """After a drain, let the next forward read the parameters themselves: nothing is in flight, and other code may
        have changed them. Gradients of an update under way (accumulation over batches) are kept for it."""
        assert not any(version.in_flight for version in self._versions())
        self._end_batch()
        self._ending = None
        self._drained = self.updates
        self._wanted = None
        self._old, self._current = [], None

    def _data(self) -> dict[str, Tensor]:
        """The trained parameters, without autograd."""
        return {name: parameter.data for name, parameter in self._parameters.items() if parameter.requires_grad}

    # -- versions ------------------------------------------------------------------------------------------------

    def _versions(self) -> list[Version]:
        """All versions, from old to new."""
        return [*self._old, *([self._current] if self._current else [])]

    def _is_needed(self, version: Version) -> bool:
        return version.in_flight > 0 or version.updates >= self.reading or version.batch >= self._open

    def _to_read(self) -> Version:
        """The version that the next forward is to read, for its batch, with what the lender has newest."""
        lender = None if self._lender is None else self._lender._to_read()
        found = (version for version in reversed(self._versions()) if version.updates == self._wanted)
        version = next(found, None) or self._newest()
        if version.batch == self._batch and version.lender is lender:
            return version
        own = {name: version.leaves[name] for name in self._parameters}
        if version.batch != self._batch:
            own = self._leaves(own)
        lent = {} if lender is None else self._leaves({name: lender.leaves[name] for name in self._borrowed})
        again = Version(version.updates, self._batch, {**own, **lent}, {*version.copied}, lender)
        if version is self._current:
            self._current = again
            self._old.append(version)
        else:
            self._old.insert(self._old.index(version) + 1, again)
        return again

    def _newest(self) -> Version:
        if self._current is None:
            # With "latest", later values are written to the leaves. Corrected ones must not reach the parameters.
            apart = self._corrected and self._stashing == "latest"
            self._current = self._version(copied(self._data()) if apart else {})
        return self._current

    def _version(self, values: Mapping[str, Tensor]) -> Version:
        """The newest version, with ``values`` where there are any, otherwise with the parameters' own."""
        leaves = self._leaves({name: values.get(name, parameter) for name, parameter in self._parameters.items()})
        return Version(self.updates, self._batch, leaves, copied=set(values))

    def _leaves(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leaves in the memory of ``values``."""
        # `.data` first: its version counter is its own, so an in-place step doesn't invalidate the graphs that "latest"
        # is to run on the new values. Parameters, since layers may ask (torch's parametrizations do).
        needed = self._parameters if self._lender is None else {**self._lender._parameters, **self._parameters}
        leaves: dict[str, Tensor] = {
            name: nn.Parameter(value.data, needed[name].requires_grad) for name, value in values.items()
        }
        for name, leaf in leaves.items() if self._grown is not None else ():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self), name))
        return leaves


def _tell(versions: weakref.ref[WeightVersions], name: str, leaf: Tensor) -> None:
    """Report that a leaf's gradient has grown. The collector doesn't look into graphs: a graph that a failed step
    leaves, and that the versions refer to, would keep them and all connections if its leaves referred to them."""
    alive = versions()
    if alive is not None and alive._grown is not None:
        alive._grown(name)
