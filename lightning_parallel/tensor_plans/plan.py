"""Which modules are divided, and how: a plan, and where it comes from.

A plan maps patterns to styles (:mod:`~lightning_parallel.tensor_plans.styles`). A pattern is a dotted module name in
which ``*`` stands for one whole part of it::

    {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}

Plans are strict: a pattern that matches nothing may leave one half of a column/row pair undivided, and the model would
compute something else without an error. So each pattern must match, each style fit, and no module have two rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from lightning_parallel.cuts.layers import matching
from lightning_parallel.ranks.writes import digest
from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor_plans.around import Copy, Experts, Parameters
from lightning_parallel.tensor_plans.plan_search import found_plan, table_of
from lightning_parallel.tensor_plans.rules import layers_of, resolve
from lightning_parallel.tensor_plans.style import Plan, Style
from lightning_parallel.tensor_plans.styles import OTHER_NAMES
from lightning_parallel.values import changed

MakeRun = Callable[[], Callable[[], Any]]  # makes what runs a step
Found = tuple[dict[str, str | Style] | None, str]  # rules (None: the step can't be tried), and why there aren't any


def find_plan(
    module: nn.Module,
    given: Plan | Literal["none"] | None = None,
    count: int = 2,
    announce: Callable[[str], None] = lambda text: None,
    make_run: MakeRun | None = None,
    agreed: Callable[[Found], Found] = lambda found: found,
) -> dict[str, str | Style]:
    """The plan for a module: the given one; else that of its ``configure_tensor_parallel()`` method; else those that
    the transformers models in it bring along, or that are shipped here; else one found by trying.

    Args:
        given: the user's plan; ``"none"`` to divide nothing; None to look for one.
        count: the number of tensor ranks.
        announce: called with the text about a plan that was found.
        make_run: makes a function that runs the module's step, to find a plan by; None if it can't be run.
        agreed: returns on all ranks what one of them has found.

    Raises:
        ValueError: there is none, or it holds a style of transformers that has no counterpart here.
    """
    hook = getattr(module, "configure_tensor_parallel", None)
    if given == "none":
        return {}
    if given is not None:
        plan, source = dict(given), "plan={}"
    elif callable(hook):
        plan, source = dict(hook()), f"{type(module).__name__}.configure_tensor_parallel() returned {{}}"
    else:
        plan, without = transformers_plans(module)
        source = ""
        if without or not plan:
            found, problem = agreed(_found(module, count, make_run))
            if found is None:
                plan, found = {}, {}
            if without:  # what lies in other models, or around them, is left as it is
                found = {name: style for name, style in found.items() if name.startswith(tuple(without))}
            if found:
                announce(f"A plan for tensor parallelism was found by trying:\n{table_of(module, found)}")
            elif all(rule.style.is_alone for rule in resolve(module, plan)):
                plan = {}
                source = f"{', '.join(without.values()) or 'the model'} brings none, and none was found: {problem}"
            plan = found | plan
    if not plan and not any(isinstance(m, ParallelLayer) for m in module.modules()):  # divided by hand needs none
        raise ValueError(
            f"Tensor parallelism needs a plan, but {source}. Use another strategy, or plan='none', with which each "
            f"rank holds and computes all of it. Or give plan={{'pattern': 'style'}}, or a configure_tensor_parallel() "
            f"that returns one. The layers are {layers_of(module)}."
        )
    return plan


def _found(module: nn.Module, count: int, make_run: MakeRun | None) -> Found:
    before = _contents(module)
    # Models of transformers keep keys and values, which in a trial would be another call's.
    configs = [part.config for part in module.modules() if "PreTrainedModel" in _bases(part)]
    no_caches = [(vars(config), "use_cache", False) for config in configs if hasattr(config, "use_cache")]
    found: dict[str, str | Style] = {}
    problem = f"no pair of its layers could be divided over {count} ranks"
    try:
        with changed(no_caches):
            found = found_plan(module, make_run(), count) if make_run is not None else {}
    except Exception as error:  # any: of the user's code
        problem = f"the first step, by which one is found, raised {type(error).__name__}: {error}"
    written = [name for name, content in _contents(module).items() if content != before[name]]
    if written:  # a teacher's average: each trial has changed it
        return None, f"the first step, by which one is found, writes into '{written[-1]}'"
    return found, problem


def _contents(module: nn.Module) -> dict[str, int]:
    """A digest of each parameter, since a copy of them all would take as much memory as the model."""
    return {name: 0 if each.is_meta else int(digest(each)) for name, each in module.named_parameters()}


# -- plans of models of transformers -----------------------------------------------------------------------------

# The dimension, from the last one, along which transformers' styles divide a bare parameter (a vector along its only
# one), and the equal parts that are fused there. Experts hold matrices [experts, out, in], some [experts, in, out].
_OF_PARAMETERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2), "packed_rowwise": (-1, 2)}
)
# transformers' style names for the module that holds such parameters.
_OF_OWNERS: Mapping[str, type[Parameters]] = MappingProxyType({"moe_tp_experts": Experts, "local_params": Parameters})

# For models of transformers that bring no plan: by the name of the class, with names relative to it.
_SHIPPED: Mapping[str, Plan] = MappingProxyType(
    {
        "GPT2Model": {
            "wte": "embedding",
            "h.*.attn": "divide:num_heads,split_size",
            "h.*.attn.c_attn": "column:3",
            "h.*.attn.c_proj": "row",
            "h.*.mlp.c_fc": "column",
            "h.*.mlp.c_proj": "row",
        },
        "GPT2LMHeadModel": {"lm_head": "column_gather"},
        "GPT2DoubleHeadsModel": {"lm_head": "column_gather"},
        "GptOssModel": {  # which brings a plan for expert parallelism only
            "layers.*.self_attn.q_proj": "column",
            "layers.*.self_attn.k_proj": "column",
            "layers.*.self_attn.v_proj": "column",
            "layers.*.self_attn.o_proj": "row",
            "layers.*.self_attn": "parameters:sinks=0",
            # Gates and what they gate take turns along the dimension: pairs must not be cut.
            "layers.*.mlp.experts": "experts:gate_up_proj=2x1,gate_up_proj_bias=1,down_proj=1,down_proj_bias=sum",
        },
        "GptOssForCausalLM": {"lm_head": "column_gather"},
    }
)


def transformers_plans(module: nn.Module) -> tuple[dict[str, str | Style], dict[str, str]]:
    """The rules of all transformers models in ``module``, which they bring or which are shipped for them; and the
    models that have none for their blocks: the prefix of their layers' names, and in words what they are.

    Raises:
        ValueError: a plan holds a style that has no counterpart here.
    """
    plan: dict[str, str | Style] = {}
    without: dict[str, str] = {}
    roots: list[str] = []
    for name, model in module.named_modules():
        if "PreTrainedModel" not in _bases(model) or any(f"{name}.".startswith(root) for root in roots):
            continue  # what lies inside another one is in its plan
        prefix = f"{name}." if name else ""
        roots.append(prefix)
        own = _translated(dict(getattr(model, "tp_plan", None) or {}), name, model) | _shipped_plan(model)
        own = _without_scaled_embeddings(model, own)
        if all(rule.style.is_alone for rule in resolve(model, own)):  # a head at most
            without[prefix] = f"{type(model).__name__}{f' ({name})' if name else ''}"
        plan |= {prefix + pattern: style for pattern, style in own.items()}
    return plan, without


def _translated(theirs: dict[str, str], name: str, model: nn.Module) -> dict[str, str | Style]:
    """A plan of transformers in our styles. Patterns that match nothing, of another variant of the model, are left
    out."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    plan: dict[str, str | Style] = {}
    unknown: dict[str, str] = {}
    divided: dict[str, list[tuple[str, int, int]]] = {}  # parameters, by their owner's pattern
    for pattern, style in theirs.items():
        owner, _, own = pattern.rpartition(".")
        whole = matching(pattern, modules)
        held = matching(pattern, parameters)
        if whole and style in _OF_OWNERS:
            divided.setdefault(pattern, [])
        elif held and not whole and style in _OF_PARAMETERS and theirs.get(owner) in _OF_OWNERS:
            dim, parts = _OF_PARAMETERS[style]
            divided.setdefault(owner, []).append((own, max(0, parameters[held[0]].dim() + dim), parts))
        elif whole and style == "mla_kv_a_proj":
            plan[pattern] = Copy(model.get_submodule(whole[0].rpartition(".")[0]).qk_rope_head_dim)  # type: ignore[arg-type]
        elif whole and style in OTHER_NAMES:
            plan[pattern] = OTHER_NAMES[style]
        elif (whole or held) and style != "replicate":
            unknown[pattern] = style
    for owner, dims in divided.items():
        if dims:
            plan[owner] = _OF_OWNERS[theirs[owner]](tuple(dims))
        elif theirs[owner] != "local_params":
            unknown[owner] = theirs[owner]
    if unknown:
        # All or nothing: what remains might be one half of a pair.
        raise ValueError(
            f"The tensor parallel plan of {type(model).__name__}{f' ({name})' if name else ''} holds styles without "
            f"a counterpart here: {', '.join(f'{p!r}: {s!r}' for p, s in unknown.items())}. Give a plan of your own: "
            f"plan={{'pattern': 'style'}}."
        )
    return plan


def _without_scaled_embeddings(model: nn.Module, plan: dict[str, str | Style]) -> dict[str, str | Style]:
    """The rules without Gemma's embeddings, which scale what they look up in a forward of their own. Those stay whole,
    and so does a head that is tied to one."""
    whole = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, nn.Embedding) and type(part).forward is not nn.Embedding.forward
    }
    left = {
        rule.pattern
        for rule in (resolve(model, plan) if whole else ())
        if rule.style.is_alone and id(rule.module.weight) in whole
    }
    return {pattern: style for pattern, style in plan.items() if pattern not in left}


def _shipped_plan(model: nn.Module) -> dict[str, str | Style]:
    plan: dict[str, str | Style] = {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        for base in _bases(part) & _SHIPPED.keys():
            plan |= {prefix + pattern: style for pattern, style in _SHIPPED[base].items()}
    return plan


def _bases(module: nn.Module) -> set[str]:
    """The names of the transformers classes that a module is an instance of. ``isinstance`` would have to import
    them."""
    return {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")}
