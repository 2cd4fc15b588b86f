"""Who owns what: no layer dropped, none twice, whatever the model looks like."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_parallel.pipeline.partition import Partition, partition


def chain_of(*widths: int) -> nn.Sequential:
    """Linear layers: the i-th has widths[i] parameters."""
    return nn.Sequential(*(nn.Linear(width, 1, bias=False) for width in widths))


class Blocks(L.LightningModule):
    """Embedding, blocks in a list, norm and head: a usual LightningModule."""

    def __init__(self, blocks: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, dim)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)


class SameModulesTwice(nn.Module):
    """The layers hang in a list and, once more, in a Sequential; one of them has a third name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.net = nn.Sequential(*self.layers)
        self.watched = self.layers[2]
        self.head = nn.Linear(4, 2)


class AutoEncoder(nn.Module):
    """Parts with names of their own, then joined."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.model = nn.Sequential(self.encoder, self.decoder)


class Tied(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.wte.weight


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.scales = nn.ParameterList([torch.ones(1), torch.ones(1)])
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class TwoStems(nn.Module):
    """An embedding that a second branch uses as well: one module inside two others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"words": nn.Embedding(5, 4)})
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.branch = nn.Sequential(self.stem["words"], nn.Linear(4, 4))


def gpt2(**options: bool) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0, **options
        )
    )


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=5,
            hidden_size=8,
            intermediate_size=16,
            num_attention_heads=2,
            vocab_size=11,
            bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
    )


def demo_transformer() -> LightningTransformer:
    return LightningTransformer(vocab_size=11)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: chain_of(5, 5, 5, 5),
    "lightning module": Blocks,
    "same modules twice": SameModulesTwice,
    "autoencoder": AutoEncoder,
    "tied": Tied,
    "loose": Loose,
    "two stems": TwoStems,
    "gpt2": gpt2,
    "llama": llama,
    "demo": demo_transformer,
}
MOST_STAGES = {"autoencoder": 2, "demo": 2}  # that the model can be cut into


def counts(parts: Partition) -> list[int]:
    return [len(parts.layers_of(stage)) for stage in range(parts.stages)]


def stage_parameters(parts: Partition, stage: int) -> set[str]:
    """First names of what a stage holds."""
    return {parts.aliases[name] for name, stages in parts.owners.items() if stage in stages}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_stages_parameters_joined_are_the_models(name: str, stages: int) -> None:
    model = MODELS[name]()
    if stages > MOST_STAGES.get(name, 4):
        with pytest.raises(ValueError, match="stages"):
            partition(model, stages)
        return
    parts = partition(model, stages)
    held = [stage_parameters(parts, stage) for stage in range(stages)]
    every = {parameter for parameter, _ in model.named_parameters()}
    assert set().union(*held) == every
    twice = {parameter for parameter in every if sum(parameter in names for names in held) > 1}
    assert twice == set(parts.shared())
    assert {parts.aliases[n] for n in parts.owners} == every
    # What is on several stages is there for a reason: loose, or tied across them.
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert all(p in parts.loose or sum(parts.aliases[n] == p for n in names) > 1 for p in twice)


def test_what_goes_with_a_layer_counts_as_its_weight() -> None:
    model = Blocks(blocks=4, dim=8)  # 72 parameters a block
    model.embedding = nn.Embedding(30, 8)  # as much as three blocks more
    assert counts(partition(model, 2, layers=["blocks.*"])) == [1, 3]


def test_a_nested_sequential_is_opened() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))))
    assert partition(net, 3).layers == ("0", "1.0", "1.1.0", "1.1.1")


def test_a_sequential_with_a_forward_of_its_own_stays_closed() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    net = nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert partition(net, 2).layers == ("0", "1")


def test_the_list_of_blocks_is_found_in_a_lightning_module() -> None:
    parts = partition(Blocks(), 2)
    assert parts.layers == tuple(f"blocks.{i}" for i in range(4))
    assert parts.outside == {"embedding": 0, "norm": 1, "head": 1}


def test_transformers_blocks_are_found() -> None:
    parts = partition(gpt2(), 2)
    assert parts.layers == tuple(f"transformer.h.{i}" for i in range(4))
    assert parts.outside == {"transformer.wte": 0, "transformer.wpe": 0, "transformer.ln_f": 1, "lm_head": 1}
    assert parts.shared() == {"transformer.wte.weight": (0, 1)}
    assert partition(gpt2(tie_word_embeddings=False), 2).shared() == {}
    parts = partition(llama(), 3)
    assert parts.layers == tuple(f"model.layers.{i}" for i in range(5))
    assert parts.outside == {"model.embed_tokens": 0, "model.norm": 2, "lm_head": 2}


def test_lightnings_demo_transformer_is_cut_between_its_layers() -> None:
    parts = partition(demo_transformer(), 2)
    assert parts.layers in (
        tuple(f"model.transformer.{half}.layers.{i}" for i in range(2)) for half in ("encoder", "decoder")
    )
    assert parts.outside["model.embedding"] == 0 and parts.outside["model.decoder"] == 1


def test_modules_between_layers_go_with_the_next() -> None:
    """The stage of the layer before leaves the step after it."""
    net = nn.Module()
    net.before, net.first, net.between, net.second, net.after = (nn.Linear(2, 2) for _ in range(5))
    parts = partition(net, 2, layers=["first", "second"])
    assert parts.outside == {"before": 0, "between": 1, "after": 1}


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_a_list_named_as_a_layer_is_refused_with_what_to_name(kind: type[nn.Module]) -> None:
    net = nn.Module()
    parts = {"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)}
    net.enc = nn.ModuleDict(parts) if kind is nn.ModuleDict else nn.ModuleList(parts.values())
    net.dec = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"layers: 'enc' is a {kind.__name__}.*'enc\.\*'"):
        partition(net, 2, layers=["enc", "dec"])


def test_a_list_outside_the_chain_is_owned_module_by_module() -> None:
    net = Blocks()
    net.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3)])
    outside = partition(net, 2, layers=["blocks.*"]).outside
    assert outside["heads.0"] == outside["heads.1"] == 1 and "heads" not in outside


def test_a_namespace_is_owned_module_by_module() -> None:
    """A plain nn.Module that is never called, as in `self.io.tokens(x)` and `self.io.head(x)`."""
    net = Blocks()
    net.io = nn.Module()
    net.io.head, net.io.scale = nn.Linear(8, 2), nn.Parameter(torch.ones(()))
    parts = partition(net, 2, layers=["blocks.*"])
    assert parts.outside["io.head"] == 1 and "io" not in parts.outside
    assert "io.scale" in parts.loose


def test_modules_without_parameters_belong_to_nobody() -> None:
    assert "drop" not in partition(Blocks(), 2).outside


def test_a_module_with_several_names_has_one_owner() -> None:
    parts = partition(SameModulesTwice(), 2, layers=["net.*"])
    assert parts.layers == ("net.0", "net.1", "net.2", "net.3")
    assert parts.outside == {"head": 1}
    assert parts.shared() == {}
    assert parts.owners["layers.3.weight"] == parts.owners["net.3.weight"] == (1,)
    parts = partition(AutoEncoder(), 2)
    assert parts.shared() == {} and parts.outside == {}
    assert parts.owners["encoder.0.weight"] == (0,) and parts.owners["decoder.0.weight"] == (1,)


def test_a_module_inside_two_others_belongs_to_the_first() -> None:
    parts = partition(TwoStems(), 2, layers=["blocks.*"])
    assert parts.outside == {"stem.words": 0, "branch.1": 1}
    assert parts.shared() == {}


def test_loose_parameters_are_on_every_stage() -> None:
    parts = partition(Loose(), 3)
    assert parts.loose == {"position", "scales.0", "scales.1"}
    assert parts.shared() == dict.fromkeys(parts.loose, (0, 1, 2))


def test_tied_parameters_are_on_the_stages_of_all_their_names() -> None:
    parts = partition(Tied(), 3)
    assert parts.shared() == {"wte.weight": (0, 2)}
    assert parts.owners["head.weight"] == (0, 2) and parts.aliases["head.weight"] == "wte.weight"
    assert not parts.loose
    assert partition(Tied(), 1).shared() == {}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (["blocks.[0]", "blocks.*"], None),  # no character classes: brackets are part of a name
        (["embedding", "blocks.*", "norm", "head"],
         ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]),
        (["*ing", "blocks.3", "blocks.0"], ["embedding", "blocks.3", "blocks.0"]),  # in the order given
        (["blocks.*.0"], ["blocks.0.0", "blocks.1.0", "blocks.2.0", "blocks.3.0"]),
    ],
)  # fmt: skip
def test_patterns_name_layers(patterns: list[str], expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="matches no module"):
            partition(Blocks(), 2, layers=patterns)
    else:
        assert partition(Blocks(), 2, layers=patterns).layers == tuple(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": ["block.*"]}, ["'block.*'", "matches no module", "Did you mean", "'blocks"]),
        ({"layers": ["nothing_like_it"]}, ["'nothing_like_it'", "Did you mean", "'blocks'"]),
        ({"layers": "blocks.*"}, ["layers='blocks.*'", "a list", "['net.blocks.*']"]),
        ({"layers": []}, ["layers=[]", "a list"]),
        ({"layers": ["blocks.0", "blocks.0.0"]}, ["'blocks.0.0' is a part of 'blocks.0'", "not both"]),
        ({"layers": ["blocks.*"], "stages": 5}, ["stages=5", "only 4 layers", "at most 4 stages", "`layers`"]),
        ({"stages": 5}, ["stages=5", "only 4 layers", "at most 4 stages"]),
        ({"balance": [1, 2]}, ["balance=[1, 2]", "2 positive layer counts", "sum to 4"]),
        ({"balance": [4, 0]}, ["balance=[4, 0]", "positive"]),
        ({"balance": [1, 1, 2]}, ["balance=[1, 1, 2]", "2 positive layer counts"]),
        ({"balance": "time"}, ["balance='time'", "'parameters'", "'layers'"]),
    ],
)  # fmt: skip
def test_a_refusal_names_the_setting_and_the_fix(options: dict[str, object], words: list[str]) -> None:
    stages = options.pop("stages", 2)
    assert isinstance(stages, int)
    with pytest.raises(ValueError) as refusal:
        partition(Blocks(), stages, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refusal.value)


def test_a_model_without_a_chain_is_told_what_to_name() -> None:
    net = nn.Module()
    net.front, net.back = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError) as refusal:
        partition(net, 2)
    assert "layers=['front', 'back']" in str(refusal.value)
    assert partition(net, 2, layers=["front", "back"]).layers == ("front", "back")
    assert partition(net, 1).layers == ("front", "back")


def test_a_list_of_lists_is_no_chain() -> None:
    net = nn.Module()
    net.levels = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert "levels.0" not in partition(net, 2).layers  # a list can't be called
    assert partition(net, 2, layers=["levels.*.*"]).layers == ("levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1")


def test_a_stage_without_trainable_parameters_is_avoided() -> None:
    net = chain_of(50, 50, 50, 2, 2)
    net[:3].requires_grad_(False)  # a frozen backbone: by size alone the cut would fall inside it
    parts = partition(net, 2)
    assert counts(parts) == [4, 1]
    net = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())
    assert counts(partition(net, 2)) == [3, 3]


def test_a_stage_without_trainable_parameters_is_refused_where_it_cannot_be_avoided() -> None:
    net = chain_of(5, 5, 5, 5)
    net[1:].requires_grad_(False)  # one trainable layer can't be on both stages
    with pytest.raises(ValueError, match="Stage 1 of 2 has no trainable parameter: it owns '2', '3'"):
        partition(net, 2)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"Stage 1 of 3 has no trainable parameter: it owns '1'.*balance"):
        partition(net, 3, balance=[1, 1, 1])


def test_the_cut_only_reads_the_model() -> None:
    model = Blocks()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    partition(model, 3)
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == before
