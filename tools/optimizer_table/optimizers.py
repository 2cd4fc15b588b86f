"""Optimizers as the field has them, short: elementwise ones, and ones that treat a parameter, or all, as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_gather
from torch.optim import Optimizer


class Short(Optimizer):
    """A step is what :meth:`move` does to each parameter, after what :meth:`look` has seen of all of them."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.look(held)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    def look(self, parameters: list[Tensor]) -> None:
        pass

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        raise TypeError("an optimizer moves a parameter here")

    def mean(self, p: Tensor, name: str, value: Tensor, decay: float = 0.9) -> Tensor:
        """A running mean in the state."""
        state = self.state[p].setdefault(name, torch.zeros_like(p))
        return state.lerp_(value, 1 - decay)


class Lookahead(Optimizer):
    """Zhang et al. 2019: around another optimizer, whose groups are its own. Every fifth step goes half way back."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups
        self.steps = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        for parameter, state in self.state.items() if self.steps % 5 == 0 else ():
            state["slow"].lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(state["slow"])
        return loss


class SavesMore(Lookahead):
    """In a format of its own, as torch_optimizer's."""

    def __init__(self, params: Any) -> None:
        super().__init__(LAMB(params))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict(), "steps": self.steps}


class LARS(Short):
    """You et al. 2017."""

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g * (p.norm() / (g.norm() + 1e-8)) * group["lr"])


class LAMB(Short):
    """You et al. 2019."""

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        update = self.mean(p, "m", g) / (self.mean(p, "v", g * g, 0.99).sqrt() + 1e-6)
        p.sub_(update * (p.norm() / update.norm()) * group["lr"])


class Noted(LARS):
    """Moves parameters by what is noted on them, as some packages of Muon do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            parameter.is_scaled = number % 3 == 0

    def move(self, p: Any, g: Tensor, group: dict[str, Any]) -> None:
        if p.is_scaled:
            super().move(p, g, group)
        else:
            p.sub_(g, alpha=group["lr"])


class NotedInState(LARS):
    """By what stands in the state from the beginning, as Moonlight's Muon does: matrices, but not the largest."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        listed = [p for group in self.param_groups for p in group["params"]]
        for parameter in listed:
            self.note(parameter, parameter.ndim == 2 and parameter.numel() < max(p.numel() for p in listed))

    def note(self, p: Any, is_scaled: bool) -> None:
        self.state[p]["is_scaled"] = is_scaled

    def is_scaled(self, p: Any) -> bool:
        return bool(self.state[p]["is_scaled"])

    def move(self, p: Any, g: Tensor, group: dict[str, Any]) -> None:
        if self.is_scaled(p):
            super().move(p, g, group)
        else:
            p.sub_(g, alpha=group["lr"])


class NotedByName(NotedInState):
    """By a word on the parameter."""

    def note(self, p: Any, is_scaled: bool) -> None:
        p.rule = "LARS" if is_scaled else "SGD"

    def is_scaled(self, p: Any) -> bool:
        return bool(p.rule == "LARS")


class KeepsIds(NotedInState):
    """By ids that it keeps."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.kept: dict[str, set[int]] = {"scaled": set()}
        super().__init__(params, **options)

    def note(self, p: Any, is_scaled: bool) -> None:
        if is_scaled:
            self.kept["scaled"].add(id(p))

    def is_scaled(self, p: Any) -> bool:
        return id(p) in self.kept["scaled"]


class KeepsParameters(LARS):
    """By a set of them."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.kept = {p for group in self.param_groups for p in group["params"] if p.ndim == 2}

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if p in self.kept:
            super().move(p, g, group)
        else:
            p.sub_(g, alpha=group["lr"])


class DividesItsWork(LARS):
    """Each rank moves some parameters, and all gather them, as KellerJordan's Muon does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]) if dist.is_initialized() else ():
            all_gather([torch.empty_like(p) for _ in range(dist.get_world_size())], p.detach())
        return loss


class LooksAhead(LARS):
    """Goes on by its last way before it asks for gradients."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.add_(self.state[p].setdefault("way", torch.zeros_like(p)), alpha=0.5)
        return super().step(closure)

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        before = p.clone()
        super().move(p, g, group)
        self.state[p]["way"] = p - before


class HostLAMB(Short):
    """LAMB without momentum, that takes its norms to the host."""

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * p.norm().item() / g.norm().item())


class Kronecker(Short):
    """Shampoo with running sums, Gupta et al. 2018."""

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        matrix = g.reshape(len(g), -1) if g.ndim else g.reshape(1, 1)
        for side in ("left", "right"):
            held = self.state[p].setdefault(side, 1e-3 * torch.eye(len(matrix), dtype=g.dtype))
            held.add_(matrix @ matrix.mT)
            values, vectors = torch.linalg.eigh(held)
            matrix = (vectors * values**-0.25 @ vectors.mT @ matrix).mT
        p.sub_(matrix.reshape(g.shape), alpha=group["lr"])


class SOAP(Short):
    """Vyas et al. 2024, on one side: Adam in the eigenbasis of Shampoo's sum."""

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        matrix = g.reshape(len(g), -1) if g.ndim else g.reshape(1, 1)
        shifts = torch.arange(1.0, len(matrix) + 1, dtype=g.dtype).diag()  # no two eigenvalues are equal
        held = self.state[p].setdefault("sum", 1e-3 * shifts)
        held.add_(matrix @ matrix.mT)
        basis = torch.linalg.eigh(held)[1]
        mean = self.mean(p, "m", g).reshape(matrix.shape)
        square = self.state[p].setdefault("v", torch.zeros_like(matrix))
        square.lerp_((basis.mT @ matrix) ** 2, 0.1)
        p.sub_((basis @ (basis.mT @ mean / (square.sqrt() + 1e-2))).reshape(g.shape), alpha=group["lr"])


class Prodigy(Short):
    """Mishchenko & Defazio 2023: the size of the step is estimated from all parameters together."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.d, self.numerator = 1e-6, 0.0

    def look(self, parameters: list[Tensor]) -> None:
        denominator = 0.0
        for p in parameters:
            assert p.grad is not None
            first = self.state[p].setdefault("first", p.clone())
            self.numerator += self.d * float((p.grad * (first - p)).sum())
            denominator += float(self.mean(p, "s", self.d * p.grad).abs().sum())
        self.d = max(self.d, self.numerator / denominator)

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g.sign(), alpha=group["lr"] * self.d)


class NormedSGD(Short):
    """By the direction of the gradient of all parameters."""

    def look(self, parameters: list[Tensor]) -> None:
        self.norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g / self.norm * group["lr"])


class NeverEmpty(LARS):
    """Fails where it has nothing to step."""

    def look(self, parameters: list[Tensor]) -> None:
        torch.stack([p.sum() for p in parameters])


class FloorSGD(Short):
    """Gradients of small norms are lengthened; others are as they are."""

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g / g.norm().clamp(max=1.0), alpha=group["lr"])


class SAM(Optimizer):
    """Foret et al. 2021: around another optimizer, with the gradient of a point that all parameters go to together."""

    def __init__(self, params: Any, base: type[Optimizer], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        run = torch.enable_grad()(closure)
        loss = run()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        ways = [p.grad * 0.05 / norm for p in held]
        for parameter, way in zip(held, ways, strict=True):
            parameter.add_(way)
        run()
        for parameter, way in zip(held, ways, strict=True):
            parameter.sub_(way)
        self.base.step()
        return loss
