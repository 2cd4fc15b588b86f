"""What a call of the pool gave back where ranks were to fail."""

from __future__ import annotations

import re
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.optim.optimizer import register_optimizer_step_post_hook

from tools.workers.pool import Failure

LIMIT = 60.0  # seconds until all ranks have ended: far below the links' timeout, also on a busy machine


class HooksAllOptimizers(Callback):
    """Registers torch's hook on the steps of all optimizers, until the run fails."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.hook = register_optimizer_step_post_hook(lambda *_: None)

    def on_exception(self, *args: Any) -> None:
        self.hook.remove()


def assert_refused(failures: list[Any], kind: str, words: list[str]) -> None:
    for rank, text in enumerate(failures):
        assert isinstance(text, Failure), f"rank {rank} went on"
        raised = list(re.finditer(rf"^(\w+\.)*{kind}: ", text, re.MULTILINE))
        assert raised, f"rank {rank} raised something else:\n{text}"
        message = text[raised[-1].start() :]
        assert all(word in message for word in words), f"rank {rank}: {message}"


def assert_lost(failures: list[Any]) -> None:
    """The stage lost is named, or that one of all was."""
    for text in failures:
        assert isinstance(text, Failure)
        assert "PeerLostError" in text, text
        last = text[text.rindex("PeerLostError: ") :]
        assert "The link to stage " in last or "A collective of several ranks broke" in last, last
        assert "The cause is in its own output" in last
