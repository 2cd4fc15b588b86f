"""recipes/models/: the example models learn, log what they promise, and do what they say. Muon and AdamW in one
optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.models.classifier import MLP, LeNet
from recipes.models.gpt import GPT
from recipes.models.muon import MuonAdamW
from recipes.models.optimizer import configure, warmup, warmup_cosine

ADAM = {"_target_": "torch.optim.AdamW", "lr": 1e-2}


def test_gpt_sees_no_token_after_the_one_it_predicts() -> None:
    model = GPT(optimizer=ADAM, vocab_size=11, context=6, layers=2, heads=2, width=8).eval()
    tokens = torch.randint(11, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    assert torch.equal(model(tokens)[:, :4], model(changed)[:, :4])
    assert not torch.equal(model(tokens)[:, 4:], model(changed)[:, 4:])


def test_schedules_rise_linearly_then_fall_to_the_floor() -> None:
    assert [warmup(step, warmup_steps=3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = [warmup_cosine(s, warmup_steps=3, total_steps=13, floor=0.1) for s in range(16)]
    assert cosine[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in zip(cosine[3:13], cosine[4:14], strict=True))
    assert cosine[13:] == pytest.approx([0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="scheduler.name='linear' is not known: use 'constant' or 'cosine'"):
        configure([nn.Parameter(torch.zeros(1))], ADAM, {"name": "linear"})


MUON = {"_target_": "recipes.models.muon.MuonAdamW", "lr": 1e-2}


def parameters() -> list[nn.Parameter]:
    """Two matrices, then a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (5, 3), (7,)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def groups(given: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": given[:2], "muon": True}, {"params": given[2:]}]


def run(given: list[nn.Parameter], *optimizers: Any, updates: range = range(5)) -> list[Tensor]:
    """Steps with gradients that depend on the parameters and on the update; the parameters afterwards."""
    for update in updates:
        for parameter in given:
            parameter.grad = torch.sin(parameter.detach() + update)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in given]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_matrices_step_as_by_torchs_muon_and_all_else_as_by_its_adamw() -> None:
    ours, theirs = parameters(), parameters()
    muon = torch.optim.Muon(theirs[:2], lr=0.01, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[2:], lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    both = MuonAdamW(groups(ours), lr=0.01, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.9))
    assert equal(run(ours, both), run(theirs, muon, adamw))
    ours, theirs = parameters(), parameters()  # without a group they are AdamW's
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    assert equal(run(ours, MuonAdamW(iter(ours), lr=0.01)), run(theirs, adamw))


def test_a_restored_optimizer_goes_on_as_if_nothing_had_been() -> None:
    whole = parameters()
    expected = run(whole, MuonAdamW(groups(whole), lr=0.01), updates=range(6))
    first = parameters()
    before = MuonAdamW(groups(first), lr=0.01)
    run(first, before, updates=range(3))
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    after = MuonAdamW(groups(second), lr=0.7)
    after.load_state_dict(before.state_dict())
    assert equal(run(second, after, updates=range(3, 6)), expected)


def test_what_is_no_matrix_is_refused_and_not_added() -> None:
    vector = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(3,\): Muon is for matrices"):
        MuonAdamW([{"params": [vector], "muon": True}], lr=0.01)
    optimizer = MuonAdamW(parameters(), lr=0.01)  # AdamW takes them all
    with pytest.raises(ValueError, match="Muon is for matrices"):
        optimizer.add_param_group({"params": vector, "muon": True})
    assert len(optimizer.param_groups) == 1


def muons(model: Any) -> set[str]:
    muon, adamw = model.configure_optimizers().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {names[id(parameter)] for parameter in muon["params"]}
    assert len(muon["params"]) + len(adamw["params"]) == len(names)
    assert chosen | {names[id(parameter)] for parameter in adamw["params"]} == set(names.values())
    return chosen


def test_muon_gets_the_matrices_of_hidden_layers_and_no_others() -> None:
    layers = ["attention.qkv", "attention.out", "mlp.0", "mlp.2"]
    for tied in (False, True):
        model = GPT(optimizer=MUON, vocab_size=8, context=8, layers=2, heads=2, width=8, tie_embeddings=tied)
        assert muons(model) == {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers}
    assert muons(MLP(optimizer=MUON)) == {"net.1.0.weight", "net.2.0.weight", "net.3.0.weight"}
    assert muons(LeNet(optimizer=MUON)) == {"net.7.weight", "net.9.weight"}
