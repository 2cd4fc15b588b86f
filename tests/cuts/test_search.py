"""Who owns what: no layer dropped, none twice, whatever the model looks like."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import CatMetric

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import partition
from tests.pipeline.nets import Around, Calls, Code, Net, SameModulesTwice, nothing

X = torch.ones(2, 3)


class Chain(nn.ModuleList):
    """Layers with so many parameters, or given ones. ``path``: their numbers, as they are called."""

    def __init__(self, *layers: int | nn.Module, path: Sequence[int] | None = None) -> None:
        super().__init__(layer(each) if isinstance(each, int) else each for each in layers)
        self.path = range(len(layers)) if path is None else path

    def step(self) -> Tensor:
        x = torch.ones(2, 2)
        for i in self.path:
            x = self[i](x)
        return x


def layer(size: int) -> nn.Module:
    return Calls(lambda m, x: x * m.weight.sum(), weight=nn.Parameter(torch.ones(size)))


def cut(model: Any, stages: int, layers: Sequence[str] | None = None, balance: Any = "parameters") -> Partition:
    step = (lambda: model.step(X)) if isinstance(model, Net) else model.step
    return partition(model, step, stages, layers, balance)


def counts(parts: Partition) -> list[int]:
    return [len(parts.layers_of(stage)) for stage in range(parts.stages)]


def test_chunks_know_what_they_compute_and_hold() -> None:
    widths = (8, 16, 16, 8)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in widths))

    def parts(*, recompute: bool) -> Partition:
        names = [str(i) for i in range(len(widths))]
        return partition(
            module, lambda: module(torch.ones(4, 8)).sum(), 2, layers=names, balance="layers", recompute=recompute
        )

    assert parts(recompute=False).operations == (2 * 4 * 8 * 2 * (8 + 16),) * 2
    # 4 samples: of each layer the output, and that of the ReLU between two.
    assert parts(recompute=False).held == (4 * 4 * (8 + 8 + 8 + 16 + 16 + 8),) * 2
    assert parts(recompute=True).held == (4 * 4 * 2 * 8,) * 2  # what layers return


# -- which layers there are --------------------------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def sequential(*layers: nn.Module) -> nn.Sequential:
    net: Any = nn.Sequential(*layers)
    net.step = lambda: net(torch.ones(4))
    return net  # type: ignore[no-any-return]


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


@pytest.mark.parametrize(("model", "stages", "expected"), [
    (lambda: Chain(4, 4, 4, path=(1, 2, 0)), 3, ["1", "2", "0"]),  # in the order of their calls
    (lambda: Net(1), 3, ["stem", "blocks.0", "head"]),  # more than the list has
    # A Sequential is opened, unless it has a forward of its own.
    (lambda: sequential(*linears(1), nn.Sequential(*linears(1), sequential(nn.ReLU(), *linears(1)))), 3,
     ["0", "1.0", "1.1.0", "1.1.1"]),
    (lambda: sequential(OwnForward(*linears(2)), OwnForward(*linears(2))), 2, ["0", "1"]),
    (lambda: Chain(OwnForward(layer(4), layer(4)), OwnForward(layer(4), layer(4))), 4, ["0.0", "0.1", "1.0", "1.1"]),
])  # fmt: skip
def test_layers_are_what_is_called_one_after_the_other(
    model: Callable[[], Any], stages: int, expected: list[str]
) -> None:
    assert cut(model(), stages).layers == tuple(expected)


def test_what_goes_with_a_layer_counts_as_its_weight() -> None:
    assert counts(cut(Chain(200, 70, 70, 70, 70), 2, layers=["1", "2", "3", "4"])) == [1, 3]


# -- who holds what is no layer ----------------------------------------------------------------------------------------


def test_modules_between_layers_go_with_the_next() -> None:
    """The stage of the layer before leaves the step after it."""
    parts = cut(Chain(4, 4, 4, 4, 4), 2, layers=["1", "3"])
    assert parts.outside == {"0": (0,), "2": (1,), "4": (1,)}


def test_what_the_step_does_not_call_goes_with_the_last_stage() -> None:
    net: Any = Net()
    net.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 3)])
    net.io = nn.Module()  # a namespace, as in `self.io.tokens(x)`
    net.io.head, net.io.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(()))
    parts = cut(net, 2)
    assert parts.outside["heads.0"] == parts.outside["heads.1"] == parts.outside["io.head"] == (1,)
    assert "heads" not in parts.units and "io" not in parts.units
    assert parts.loose == {"io.scale": ()}


def test_a_module_with_several_names_has_one_owner() -> None:
    model = SameModulesTwice()
    parts = partition(model, lambda: model.step(X), 2, ["net.*"])
    assert parts.layers == ("net.0", "net.1", "net.2", "net.3")
    assert parts.outside == {"stem": (0,), "head": (1,)}
    assert parts.shared() == {}
    assert parts.owners["blocks.3.0.weight"] == parts.owners["net.3.0.weight"] == (1,)


# -- units that are called several times -------------------------------------------------------------------------------


def test_the_calls_of_a_unit_are_on_one_stage_if_nothing_of_later_ones_comes_in_between() -> None:
    class EncoderDecoder(Chain):
        def step(self) -> Tensor:
            """Both halves use one embedding. The decoder's input needs nothing of the encoder."""
            embed, *layers = self
            memory = layers[1](layers[0](embed(torch.ones(2))))
            return layers[3](layers[2](embed(torch.zeros(2)) + memory))

    parts = cut(EncoderDecoder(4, 4, 4, 4, 4), 2)
    assert parts.units["0"] == (0,) and parts.shared() == {}


def test_a_unit_that_is_called_on_both_sides_of_a_cut_is_held_by_both_stages() -> None:
    parts = cut(Chain(4, 4, path=(0, 1, 0, 1)), 2)
    assert parts.layers == ("0", "1") * 2 and parts.calls["1", 0] == 0 and parts.calls["1", 1] == 1
    assert set(parts.shared()) == {"0.weight", "1.weight"}


def test_a_cut_that_keeps_a_unit_together_is_preferred() -> None:
    """By size alone it would fall between the first one's calls."""
    assert cut(Chain(6, 4, 4, 4, path=(0, 0, 1, 2, 3)), 2).shared() == {}


def test_a_unit_that_collects_statistics_stays_together() -> None:
    """Two copies would see half of the calls each."""

    model, layers = Chain(4, 4, 4, nn.BatchNorm1d(2), path=(0, 3, 1, 3, 2, 3)), ["0", "1", "2"]
    assert counts(cut(model, 2, layers)) == [1, 2]  # before its first call
    with pytest.raises(ValueError, match=r"stages=3, .* between the calls of '3'.*torch\.cat.*use at most 2 stages"):
        cut(model, 3, layers)
    with pytest.raises(ValueError, match="between two calls of a module that collects statistics"):
        cut(model, 2, layers, balance=[2, 1])


# -- the settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patterns", "expected"), [
    (["head", "*em", "blocks.3", "blocks.0"], ("stem", "blocks.0", "blocks.3", "head")),  # as called
    (["blocks.*.0"], ("blocks.0.0", "blocks.1.0", "blocks.2.0", "blocks.3.0")),
])  # fmt: skip
def test_patterns_name_layers(patterns: list[str], expected: tuple[str, ...]) -> None:
    assert cut(Net(), 2, layers=patterns).layers == expected


@pytest.mark.parametrize(("options", "words"), [
    ({"layers": ["blocks.[0]", "blocks.*"]}, ["matches no module"]),  # brackets are part of a name
    ({"layers": ["nothing_like_it"]}, ["'nothing_like_it'", "Did you mean", "'blocks'"]),
    ({"layers": "blocks.*"}, ["layers='blocks.*'", "a list", "['net.blocks.*']"]),
    ({"layers": ["blocks"]}, ["layers: 'blocks' is a ModuleList", "'blocks.*'"]),
    ({"layers": ["blocks.0", "blocks.0.0"]}, ["'blocks.0.0' is a part of 'blocks.0'", "not both"]),
    ({"layers": ["unused", "blocks.0"]}, ["layers", "doesn't call 'unused'"]),
    ({"stages": 20}, ["stages=20", "layers to share out", "at most"]),
    ({"balance": [4, 0]}, ["balance=[4, 0]", "positive"]),
])  # fmt: skip
def test_a_refusal_names_the_setting_and_the_fix(options: dict[str, Any], words: list[str]) -> None:
    model: Any = Net()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(ValueError) as refusal:
        cut(model, **{"stages": 2, **options})
    for word in words:
        assert word in str(refusal.value)


def test_operations_weigh_layers_by_what_they_compute() -> None:
    """A convolution has few parameters and much to do."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 12 * 12, 8))

    def step() -> Tensor:
        return net(torch.ones(2, 1, 16, 16))

    assert partition(net, step, 2).bounds in ((0, 2, 4), (0, 3, 4))
    assert partition(net, step, 2, balance="operations").bounds == (0, 1, 4)


def test_a_stage_without_parameters_is_avoided() -> None:
    net = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())
    assert counts(partition(net, lambda: net(torch.ones(2, 4)), 2)) in ([3, 3], [4, 2])


# -- from step to step ----------------------------------------------------------------------------------------------


def keep(model: Any, x: Tensor) -> Tensor:
    """For the next step."""
    model.kept = x.detach()
    return x


def use(model: Any, x: Tensor) -> Tensor:
    return x if model.kept is None else x + model.kept.mean()


@pytest.mark.parametrize(("before", "after", "stages"), [
    (use, keep, 1), (nothing, lambda model, x: use(model, keep(model, x)), 2), (nothing, keep, 2),
])  # fmt: skip
def test_a_value_kept_from_step_to_step_is_for_the_last_stage_alone(before: Code, after: Code, stages: int) -> None:
    model = Around(None, before, after)
    assert partition(model, lambda: model.step(X), stages).stages == stages
    assert model.kept is None
    if stages == 1:
        with pytest.raises(ValueError, match="On stage 0 'blocks.0' gets what an earlier step has computed"):
            partition(model, lambda: model.step(X), 2)


def keep_another(model: Any, x: Tensor) -> Tensor:
    model.last, model.kept = model.kept, x.detach()
    return x


def keep_another_view(model: Any, x: Tensor) -> Tensor:
    model.kept = model.body(x).detach()
    return x


def use_up(model: Any, x: Tensor) -> Tensor:
    x, model.kept = x * model.kept.mean(), None
    return x


@pytest.mark.parametrize(("before", "after", "words"), [
    (keep_another, lambda model, x: x + (0.0 if model.last is None else model.last.mean()),
     "the end of the step gets what an earlier step has computed and kept.*'1f1b'"),
    (keep_another_view, use_up, "keeps what layers return on a module.*'1f1b'"),
])  # fmt: skip
def test_a_stage_of_several_chunks_keeps_nothing_for_later(before: Code, after: Code, words: str) -> None:
    model = Around(None, before, after)
    model.last = None
    assert partition(model, lambda: model.step(X), 2).stages == 2
    with pytest.raises(ValueError, match=words):
        partition(model, lambda: model.step(X), 2, placement=(0, 1, 1, 0))


def test_what_a_hook_on_a_chunks_last_layer_leaves_is_seen() -> None:
    """Hooks on blocks collect what these return, until the end of the step."""

    def add_collected(model: Any, x: Tensor) -> Tensor:
        x = x + sum(each.mean() for each in collected)
        collected.clear()
        return x

    model, collected = Around(None, nothing, add_collected), list[Tensor]()
    model.collected = collected
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, output: collected.append(output))
    assert partition(model, lambda: model.step(X), 2).stages == 2
    with pytest.raises(ValueError, match="On stage 0 the end of the step gets what an earlier step has computed and"):
        partition(model, lambda: model.step(X), 2, placement=(0, 1, 1, 0))


def test_what_only_the_first_step_calls_is_refused() -> None:
    def call_once(model: Any, x: Tensor) -> Tensor:
        model.kept = model.blocks[0](x) if model.kept is None else model.kept
        return x

    model = Around(None, call_once)
    with pytest.raises(ValueError, match="calls 'blocks.0' or not, by .* what an earlier step has stored"):
        partition(model, lambda: model.step(X), 2)


Runs = Callable[[Any, Tensor, Tensor], Any]  # what a layer does, given its input and output; it may return another


class Again(nn.Module):
    """A layer that may do something else when it runs again."""

    def __init__(self, does: Runs) -> None:
        super().__init__()
        self.does = does
        self.layer = nn.Linear(2, 2)
        self.state: Any = None
        self.generator = torch.Generator()
        self.calls = 0
        self.metric = CatMetric(nan_strategy="disable")
        self.held, self.emptied = {"state": torch.zeros(2)}, list[Tensor]()
        self.turns = [torch.zeros(2), torch.ones(2)]
        self.recent = OrderedDict(first=torch.zeros(2), second=torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        found = self.does(self, x, y)
        return found if isinstance(found, Tensor) else y


def keeps_state(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.state, before = y.mean(0), m.state
    return y if before is None else y + before


def keeps_state_in_a_dictionary(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.held["state"] = x + m.held["state"]
    return m.layer(m.held["state"])


def keeps_state_of_a_scan(m: Any, x: Tensor, y: Tensor) -> Tensor:
    scanned = torch.zeros(3, 2)
    scanned[:] = y if m.state is None else y + m.state  # into a tensor of its own: the layer is run on stand-ins
    m.state = scanned[-1]
    return scanned


def takes_turns(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.turns.append(m.turns.pop(0))
    return y + m.turns[0]


DIFFERS: dict[str, Runs] = {
    "state": keeps_state,
    "state in a dictionary": keeps_state_in_a_dictionary,
    "state of a scan": keeps_state_of_a_scan,
    "generator": lambda m, x, y: y * torch.rand((), generator=m.generator),
    "generator of Python": lambda m, x, y: y * random.random(),
    "number": lambda m, x, y: setattr(m, "calls", m.calls + 1),
    "list emptied by the step": lambda m, x, y: m.emptied.append(y),
    "list in turns": takes_turns,
    "hook inside that collects": lambda m, x, y: None,
}
IS_THE_SAME: dict[str, Runs] = {
    "plain": lambda m, x, y: None,
    "dropout": lambda m, x, y: F.dropout(y, 0.5),
    "chosen by values": lambda m, x, y: y.index_add(0, (y[:, 0] > 0).nonzero()[:, 0], y[y[:, 0] > 0]),
    "number made once": lambda m, x, y: setattr(m, "calls", m.calls or 1),
    "made again": lambda m, x, y: setattr(m, "state", (x.shape, [y], torch.distributions.Normal(0.0, 1.0))),
    "metric that keeps a list": lambda m, x, y: m.metric.update(y.detach().mean()),
    "the last one that was used": lambda m, x, y: m.recent.move_to_end("first"),
}


def recomputed(kind: str) -> Partition:
    layers = [Again({**DIFFERS, **IS_THE_SAME}[kind]) for _ in range(4)]
    model = nn.Sequential(*layers)
    model.seen = []
    for layer in layers if kind == "hook inside that collects" else ():
        layer.layer.register_forward_hook(lambda part, args, y: model.seen.append(y.detach()))

    def step() -> Tensor:
        loss: Tensor = model(torch.ones(3, 2)).sum()
        for kept in (*(layer.emptied for layer in layers), model.seen):
            kept.clear()
        return loss

    return partition(model, step, 2, recompute=True)


@pytest.mark.parametrize("kind", [*DIFFERS, *IS_THE_SAME])
def test_layers_that_do_something_else_when_they_run_again_are_not_recomputed(kind: str) -> None:
    words = "activation_checkpointing=True: '0' does something else when it runs again"
    with pytest.raises(ValueError, match=words) if kind in DIFFERS else nullcontext():
        recomputed(kind)


def test_layers_after_a_value_that_was_asked_for_are_on_the_last_stage() -> None:
    class Checked(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if not x.isfinite().all():
                raise ValueError
            for block in self.blocks[1:]:
                x = block(x)
            return x

    model = Checked(blocks=8)
    assert partition(model, lambda: model.step(X), 2).units["blocks.1"] == (1,)


def test_a_layer_of_many_calls_is_tried_twice_in_each() -> None:
    layer = Again(lambda m, x, y: runs.append(1))
    runs, model = list[int](), nn.ModuleList([layer])

    def step() -> Tensor:
        x = torch.ones(3, 2)
        for _ in range(6):
            x = layer(x)
        return x.sum()

    partition(model, step, 2, recompute=True)
    assert len(runs) == 6 * (2 + 2)  # in two dry runs, and twice in the one that tries layers
