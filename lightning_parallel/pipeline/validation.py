"""An update that was made as if nothing were clipped is validated while the next batch begins.

Clipping needs the norm of all stages' gradients. In a V the next batch's first microbatch comes by every stage on its
way to the turn, after that stage's update. It takes the squared norms along. The stage at the turn knows all of them
when the first one comes::

    stage 0   U | F0 F1 F2 F3 F4 F'0         U: an update        F: chunks before the turn
              n0 \\-->                                            F': chunks after it
    stage 1   . U | F0 F1 F2 F'0 F3
                n0+n1 \\-->   \\
    stage 2   . . U | F0 F'0 F1               n0 + n1 + n2 is in: do the updates hold?

If they hold, the microbatch goes back through the stages. If not, the stage at the turn ends its stream instead, and so
does each stage that gets this end. By then a stage has run forwards of its first chunk only, since all else waits for
that microbatch. These are dropped (:meth:`.Engine.take_back`), the update is made again, and the batch begins anew.

It is the optimizer's post-validation of arXiv:2401.10241, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class TakenBack(Exception):
    """The updates before this batch don't hold, so what has run of the batch doesn't count."""


class Validation:
    """The validation of one update of all stages.

    Args:
        square: the squared norm of this stage's gradients, a scalar on its device.
        holds: tells for that of all stages whether the updates hold. It waits for the device.
        accept: called when this stage knows that they do.
    """

    def __init__(self, square: Tensor, holds: Callable[[Tensor], bool], accept: Callable[[], None]) -> None:
        self.square = square
        self._holds, self.accept = holds, accept

    def arrived(self, square: Tensor) -> None:
        """Add the squared norm of the stages before this one."""
        self.square = square + self.square

    def check(self) -> None:
        """At the turn, where it is that of all stages.

        Raises:
            TakenBack: the updates don't hold.
        """
        if not self._holds(self.square):
            raise TakenBack
