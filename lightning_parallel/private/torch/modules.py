"""Private names of torch about modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary from which a module's own parameters are read. ``setattr`` would check each parameter in every
    step, and refuses a plain tensor in a parameter's place, which ``torch.func.functional_call`` puts there too."""
    return module._parameters


def places_of(module: nn.Module, names: Mapping[int, str]) -> list[tuple[dict[str, Any], str, str]]:
    """Every place in a module's tree from which one of these parameters (``names``, by id) is read, tied ones included:
    the dictionary, the key in it, and the name. Gathering replaces what is there, and so do versions of the weights."""
    stores = [parameters_of(part) for part in module.modules()]
    return [(store, key, names[id(each)]) for store in stores for key, each in store.items() if id(each) in names]


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary from which a module's own buffers are read."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary from which a module's own children are read."""
    return module._modules


def has_hooks(module: nn.Module, *, on_outputs: bool = True) -> bool:
    """Has anyone registered a hook on the module? If not ``on_outputs``, hooks that see the outputs only don't count.
    torch has no public name for this."""
    left_out = () if on_outputs else ("_forward_hooks",)
    return any(name.endswith("_hooks") and value for name, value in vars(module).items() if name not in left_out)


def forward_hooks(module: nn.Module) -> int:
    """The number of hooks that see this module's outputs."""
    return len(module._forward_hooks)


def has_hooks_before(module: nn.Module, own: Any) -> bool:
    """Do hooks of the user's see, and perhaps change, this module's outputs before the hook ``own`` does?"""
    for hook in module._forward_hooks.values():
        if hook is own:
            return False
        if not _source_of(hook).startswith("lightning_parallel."):
            return True
    return False


def move_forward_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the hooks on a module's outputs to another module. The handles that remove them keep working."""
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        setattr(new, name, getattr(old, name))


def has_full_backward_hooks(module: nn.Module) -> bool:
    """Does a hook see, and perhaps change, the gradients of this module's inputs and outputs?"""
    return bool(module._backward_hooks)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Does a hook of the user's see, and perhaps change, the gradient of this tensor? torch has no public name for
    this. fully_shard's own hooks only gather a unit, and those of this library are known."""
    hooks = [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]
    return any(not _source_of(hook).startswith(("torch.distributed.fsdp", "lightning_parallel.")) for hook in hooks)


def _source_of(hook: Any) -> str:
    """The name of the Python module that defines a hook's function; of a partial, its function's."""
    return getattr(getattr(hook, "func", hook), "__module__", "")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Do hooks of the user's run around an optimizer's steps, its own or those of all optimizers? torch has no public
    name for this."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


@contextmanager
def hooks_of_all_optimizers_left_out() -> Iterator[None]:
    """Inside, hooks on the steps of all optimizers don't run."""
    known: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [(hooks, dict(hooks)) for hooks in known]
    for hooks, _ in before:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, held in before:
            hooks.update(held)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module without parameters, buffers and children of its own, as torch.nn.DataParallel begins one.
    Modules override the method to copy what else they need: recurrent layers do."""
    copy: nn.Module = module._replicate_for_data_parallel()
    return copy


def is_compiled(module: nn.Module) -> bool:
    """Is it what torch.compile has made of a module? That hands all assignments on, those of a copy too."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_graphed(module: nn.Module) -> bool:
    """Is its forward of torch.cuda.make_graphed_callables? Only the place of its definition shows it."""
    return getattr(module.forward, "__module__", None) == torch.cuda.graphs.__name__
