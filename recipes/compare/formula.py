"""What a rank has to send in a step by theory: from the sizes of parameters and activations, no message looked at.

    DDP, data axis     gradients all-reduced once
    FSDP               parameters all-gathered for the forward and, where freed after it, for the backward; gradients
                       reduce-scattered
    tensor parallel    an all-reduce of the output of each row layer and embedding, and of the input's gradient of each
                       column layer; an all-gather of the output of one that gathers
    pipeline           for each microbatch and cut, the activation forward and its gradient back

Strategies without a formula here (sequence parallelism, tied weights, a user's own) get none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.private.torch import tree_leaves
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from lightning_parallel.strategies.fully_sharded import FullyShardedStrategy
from lightning_parallel.strategies.staged import StagedStrategy
from lightning_parallel.strategies.tensor import TensorParallelStrategy
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from recipes.traffic import POINT_TO_POINT, wire_bytes


def ddp(gradient_bytes: int, ranks: int) -> dict[str, float]:
    """By kind of message: bytes that each rank sends in a step."""
    return {"all-reduce": wire_bytes("all-reduce", gradient_bytes, ranks)}


def fsdp(whole_bytes: int, regathered_bytes: int, gradient_bytes: int, ranks: int) -> dict[str, float]:
    """
    Args:
        whole_bytes: of all parameters, their first dimension filled up to a multiple of ``ranks``.
        regathered_bytes: of those that are freed after the forward.
        gradient_bytes: of the trainable ones.
    """
    return {
        "all-gather": wire_bytes("all-gather", whole_bytes + regathered_bytes, ranks),
        "reduce-scatter": wire_bytes("reduce-scatter", gradient_bytes, ranks),
    }


class Expected:
    """Watches the sizes of activations between :meth:`start` and :meth:`stop`, and gives the formula's bytes.

    Attributes:
        incoming: point-to-point bytes of the activations that came in; as many gradients go back.
    """

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self.incoming = 0
        self._strategy, self._module = strategy, module
        self._activations: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        for part in self._module.modules():
            if isinstance(part, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
                self._hooks.append(part.register_forward_hook(self._divided_layer))
        if isinstance(self._strategy, StagedStrategy):
            parts = self._strategy.stage.partition
            for chunk in self._strategy.stage.chunks:
                if chunk > 0 and parts.placement[chunk - 1] != self._strategy.stage.index:
                    first = self._module.get_submodule(parts.layers[parts.layers_of(chunk).start])
                    # Called after the stage's own hook, when what came in is this layer's input.
                    self._hooks.append(first.register_forward_pre_hook(self._first_layer))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def sent(self, steps: int) -> dict[str, float] | None:
        """By kind of message, in one of the ``steps`` that were watched; point-to-point is :attr:`incoming`'s part."""
        strategy = self._strategy
        parameters = [p for p in self._module.parameters() if not isinstance(p, AbsentTensor)]
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        if isinstance(strategy, DDPStrategy):
            return ddp(trained, strategy.world_size)
        if isinstance(strategy, FullyShardedStrategy):
            return self._fsdp(strategy)
        if not isinstance(strategy, StagedStrategy | TensorParallelStrategy):
            # Copies between the GPUs of one process are no messages, but not nothing either.
            copies = isinstance(strategy, DataParallelStrategy) and strategy.root_device.type != "cpu"
            return {} if isinstance(strategy, SingleDeviceStrategy) and not copies else None
        if strategy.layout.size("tensor") > 1 and strategy.options.sequence_parallel:
            return None
        sent = {kind: nbytes / steps for kind, nbytes in self._activations.items()}
        replicas = strategy.layout.size("data")
        if replicas > 1:
            sent["all-reduce"] = sent.get("all-reduce", 0) + ddp(trained, replicas)["all-reduce"]
        if self.incoming:
            sent[POINT_TO_POINT] = self.incoming / steps
        return sent

    def _fsdp(self, strategy: FullyShardedStrategy) -> dict[str, float]:
        ranks = strategy.layout.size("data")
        inner = {
            parameter
            for part in self._module.modules()
            if isinstance(part, FSDPModule)
            for parameter in part.parameters()
        }
        whole = regathered = trained = 0
        for parameter in self._module.parameters():
            if isinstance(parameter, DTensor):
                padded = -(-parameter.shape[0] // ranks) * ranks * (parameter.nbytes // parameter.shape[0])
                whole += padded
                trained += padded * parameter.requires_grad
                regathered += padded * (parameter in inner and strategy.options.reshard_after_forward)
        return fsdp(whole, regathered, trained, ranks)

    def _divided_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x: Tensor = args[0]
        group = layer.group
        if group.size() == 1 or isinstance(output, AbsentTensor):  # type: ignore[union-attr, operator]
            return
        nbytes = output.nbytes
        if isinstance(layer, ColumnParallelLinear):
            if layer.copy_input and x.requires_grad:
                self._add("all-reduce", x.numel() * output.itemsize, layer)
            if layer.gather_output:
                self._add("all-gather", nbytes, layer)
            return
        self._add("all-reduce", nbytes, layer)
        if isinstance(layer, RowParallelLinear) and not layer.input_is_parallel and x.requires_grad:
            self._add("all-gather", x.numel() * output.itemsize, layer)

    def _add(self, kind: str, nbytes: int, layer: Any) -> None:
        self._activations[kind] += round(wire_bytes(kind, nbytes, layer.group.size()))

    def _first_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        live = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and not isinstance(leaf, AbsentTensor))
        self.incoming += sum(leaf.nbytes for leaf in live)
