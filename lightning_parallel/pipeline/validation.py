"""An update that was made as if nothing were clipped is validated while the next batch begins.

Clipping needs the norm of all stages' gradients. So does a loss scaler: where any of them overflow, it is infinite or
NaN. In a V the next batch's first microbatch comes by every stage on its
way to the turn, after that stage's update. It takes the squared norms along::

    stage 0           U   F0  F'0 F1  F'1     U    an update
                  n1+n2 /        \\            F0   microbatch 0 before the turn
    stage 1       U   F0  F1  F2  F'0 F3      F'0  microbatch 0 after the turn
                 n2 /                \\        n2   the squared norm of stage 2
    stage 2   U   F0  F1  F2  F3  F4  F'0

Stage 0, at the turn, has n0 + n1 + n2 before its F'0, and decides. If the update holds, the microbatch goes back
through the stages, and each of them knows when it comes. If not, stage 0 ends its stream instead, and so does each
stage that gets this end. By then a stage has run forwards before the turn only, since all else waits for that
microbatch. These are dropped (:meth:`.Engine.drop_batch`), the update is made again or skipped, and the batch
begins anew.

It is the optimizer's post-validation of arXiv:2401.10241, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class TakenBack(Exception):
    """The update before this batch doesn't hold, so what has run of the batch doesn't count."""


class Validation:
    """The validation of one update of all stages.

    Args:
        square: the squared norm of this stage's gradients, a scalar on its device.
        holds: tells from that of all stages whether the update holds. It waits for the device.
        accept: called when this stage knows that it does.
    """

    def __init__(self, square: Tensor, holds: Callable[[Tensor], bool], accept: Callable[[], None]) -> None:
        self.square = square
        self._holds, self.accept = holds, accept

    def arrived(self, square: Tensor) -> None:
        """Add the squared norm of the stages before this one."""
        self.square = square + self.square

    def check(self) -> None:
        """Decide, at the turn, where ``square`` is that of all stages.

        Raises:
            TakenBack: the update doesn't hold.
        """
        if not self._holds(self.square):
            raise TakenBack
