"""PEFT's layers under a plan: how a rule for a layer applies where PEFT has wrapped it in an adapter.

LoRA keeps the layer as ``base_layer``, and adds ``lora_B(lora_A(dropout(x)))`` to what it returns. Of a column layer
the outputs are divided, so those of lora_B are too. Of a row layer the inputs are divided, so those of lora_A are::

              x ── base_layer (column) ──┐                      x piece ── base_layer (row) ──┐
              └─ lora_A ── lora_B ───────┴─ y piece              └─ lora_A (row) ── lora_B ───┴─ y
                           (column)

What isn't named here stays whole. The trained copy of a layer that PEFT keeps beside it (``modules_to_save``) is
divided as the layer is. PEFT's modules are recognised by the names of their children, without importing PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_parallel.tensor.around import OutsideRegion, around
from lightning_parallel.tensor.style import Rule, Site, Style

_OF_LORA = {"base_layer", "lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B"}


class Outside(Style):
    """Runs a dropout on whole activations: all ranks must draw the same mask."""

    name = "outside"
    in_sequence_blocks = True

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return around(rule.module, OutsideRegion, site, region=site.region)


def without_adapters(rule: Rule) -> list[Rule]:
    """The rules for the layers inside a module of PEFT's; ``rule`` itself if it is for no such module.

    Raises:
        ValueError: the adapter isn't plain LoRA.
    """
    children = dict(rule.module.named_children())
    if "original_module" in children and "modules_to_save" in children:
        kept = [f"modules_to_save.{name}" for name, _ in children["modules_to_save"].named_children()]
        return [_part(rule, name, rule.style) for name in ("original_module", *kept)]
    if "base_layer" not in children:
        return [rule]
    more = [name for name, child in children.items() if name not in _OF_LORA and any(True for _ in child.parameters())]
    if more or "lora_A" not in children or getattr(rule.module, "lora_variant", None):
        what = ", ".join(more) or "another method than LoRA"
        raise ValueError(rule.misfit(f" of PEFT with {what}: only plain LoRA is known under a tensor plan."))
    rules = [_part(rule, "base_layer", rule.style)]
    if rule.style.leaves_divided:
        rules += [_part(rule, name, rule.style) for name in _held(children, "lora_B")]
        rules += [_part(rule, name, Outside()) for name in _held(children, "lora_dropout")]
    if rule.style.takes_divided:
        rules += [_part(rule, name, rule.style) for name in _held(children, "lora_A")]
    return rules


def _held(children: dict[str, nn.Module], container: str) -> Iterator[str]:
    for name, child in children[container].named_children():
        if not isinstance(child, nn.Identity):
            yield f"{container}.{name}"


def _part(rule: Rule, name: str, style: Style) -> Rule:
    names = tuple(f"{whole}.{name}" for whole in rule.names)
    return replace(rule, module=rule.module.get_submodule(name), names=names, style=style, wrapper=f".{name}")
