"""All ranks stop after the same batch, whichever of them sets ``trainer.should_stop``, and though some are ahead.

The stage with the step's first chunk begins each batch before the others: they need what it sends. So it decides after
each batch whether the run goes on, and the others wait for its answer before they begin the next one. What another
stage wants gets to it in a message of each batch, which it reads as many batches later as it may be ahead::

    first     batch 0, go on | batch 1, go on | batch 2, reads "stop" of batch 0: stop
    last                     | batch 0: stop? | batch 1        | batch 2, stop

If the first stage sets it, too, by a value that all have read, they stop after that very batch, as one process does.
"""

from __future__ import annotations

import torch

from lightning_parallel.messages.side_links import next_message, side_links
from lightning_parallel.ranks.collectives import highest
from lightning_parallel.ranks.run import Run


class CommonStop:
    """``trainer.should_stop``, the same on all ranks between two batches.

    Args:
        deciding: the stage that decides.
    """

    def __init__(self, run: Run, deciding: int) -> None:
        layout = run.layout
        self._run, self._decides = run, layout.stage == deciding
        stages = range(layout.stages) if self._decides else [deciding]
        self._senders, self._receivers = side_links(run, 1, to=stages, of=stages)
        # On the deciding stage, the ranks of all copies of it.
        copies = [each.rank for each in layout.everyone() if each.stage == deciding]
        self._peers = run.groups.on_host(copies) if self._decides and len(copies) > 1 else None
        self._unread = 0  # batches whose messages to the deciding stage haven't been read

    def agree(self, *, meet: bool = False) -> None:
        """After each batch's last hook. All ranks call it.

        Args:
            meet: all stages are at the same point, and nothing is left unread.

        Raises:
            PeerLostError: a stage has stopped.
        """
        mine = self._run.trainer.should_stop
        if self._decides:
            self._unread += 1
            due = max(0, self._unread - (0 if meet else self._run.ahead()))
            self._unread -= due
            wishes = [self._taken() for _ in range(due)]
            stop = any(wishes) or mine
            if self._peers is not None:
                stop = highest(self._peers, int(stop)) == [1]
            self._send(stop)
            self._run.trainer.should_stop = stop
        else:
            self._send(mine)
            self._run.trainer.should_stop = self._taken()
        if meet:
            for sender in self._senders:
                sender.flush()

    def _send(self, stop: bool) -> None:
        for sender in self._senders:
            sender.flush(keep=self._run.ahead() + 1)  # older ones are known to have been read
            sender.send([torch.tensor(stop)], place=0)

    def _taken(self) -> bool:
        """The next message of each of the others: does one of them say stop?"""
        messages = [next_message(receiver) for receiver in self._receivers]
        return any(bool(stop) for (stop,) in messages)
