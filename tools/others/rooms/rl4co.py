"""rl4co: a policy on the travelling salesman problem, as in its quickstart."""

from __future__ import annotations

from typing import Any

import torch
from rl4co.envs import TSPEnv
from rl4co.models import REINFORCE, AttentionModelPolicy

from tools.others.entry import SAMPLES, Entry


class OwnLoader(Entry):
    """The module brings its loaders."""

    __slots__ = ()

    def make(self, batch_size: int) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(7)
        env = TSPEnv(generator_params={"num_loc": 6})
        policy = AttentionModelPolicy(env_name="tsp", embed_dim=16, num_encoder_layers=2, num_heads=2)
        module = REINFORCE(env, policy, baseline="exponential", batch_size=batch_size, train_data_size=SAMPLES,
                           val_data_size=8, test_data_size=8)  # fmt: skip
        return module.train(), {}


ENTRIES = (OwnLoader("reinforce, attention model", "rl4co", dtype=torch.float32),)
