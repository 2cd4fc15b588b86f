"""Calls are intercepted in the order that is asked for, and modules are given back as they were."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import CatMetric

from lightning_parallel.interception import Interception
from lightning_parallel.private.torch.modules import forward_hooks


def test_hooks_come_around_the_users() -> None:
    module, order = nn.Linear(1, 1), []
    module.register_forward_pre_hook(lambda *_: order.append("user before"))
    module.register_forward_hook(lambda *_: order.append("user after"))
    interception = Interception()
    interception.before(module, lambda *_: order.append("before"))
    interception.after(module, lambda *_: order.append("first"), first=True)
    interception.after(module, lambda *_: order.append("last"), first=False)
    module(torch.ones(1, 1))
    assert order == ["user before", "before", "first", "user after", "last"]
    interception.remove()
    assert forward_hooks(module) == 1


def test_a_forward_s_signature_stays_that_of_the_module() -> None:
    """Some choose by it what to pass."""
    module, interception = nn.Bilinear(1, 1, 1), Interception()
    interception.instead(module, partial(lambda *args: args))
    assert [*inspect.signature(module.forward).parameters] == ["input1", "input2"]
    assert module.forward(1) == (1,)
    interception.remove()


def test_a_forward_of_the_instances_own_is_given_back() -> None:
    """Twice on one module: the last one put on is the first one taken off."""
    module = nn.Linear(1, 1)
    own = partial(torch.mul, other=2)
    module.forward = own  # type: ignore[method-assign, assignment]

    def plus(forward: Any, x: Tensor) -> Tensor:
        return forward(x) + 1  # type: ignore[no-any-return]

    interception = Interception()
    for _ in range(2):
        interception.instead(module, partial(plus, module.forward))
    assert module(torch.ones(1)).item() == 4
    interception.remove()
    assert module.forward is own and module(torch.ones(1)).item() == 2


def test_a_copy_and_a_pickle_have_the_module_alone() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    net[0].register_forward_hook(print)
    plain = [dict(vars(part)) for part in net]
    first, second = Interception(), Interception()
    for interception in (first, second):  # one inside the other
        interception.before(net[0], lambda *_: None)
        interception.after(net[0], lambda *_: None, first=False)
        interception.instead(net[0], lambda x: x)
        interception.instead(net[1], lambda x: x)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [vars(part).keys() for part in copied] == [part.keys() for part in plain]
        assert list(copied[0]._forward_hooks.values()) == [print] and not copied[0]._forward_pre_hooks
        assert torch.equal(copied[0].weight, net[0].weight) and copied[0].weight is not net[0].weight
    second.remove()
    first.remove()
    assert [vars(part).keys() for part in net] == [part.keys() for part in plain]


def test_a_metric_is_copied_alone_after_its_state_and_so_its_hash_have_changed() -> None:
    metric, interception = CatMetric(), Interception()
    interception.after(metric, lambda *_: None, first=True)
    metric.update(1.0)
    interception.instead(metric, partial(metric.forward))
    assert not copy.deepcopy(metric)._forward_hooks
    interception.remove()
    assert not metric._forward_hooks and "__reduce_ex__" not in vars(metric)
