"""Private names of torch about the graph of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.utils.hooks import RemovableHandle


def run_backward(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[GradientEdge] = ()
) -> None:
    """``torch.autograd.backward`` from edges: up to ``leaves``, or to all leaves. Gradients have to have their edges'
    shapes. torch's own compares them, in Python, which takes longer than a small layer's backward. Its engine doesn't:
    it sums what has been broadcast."""
    _engine_run_backward(
        tuple(edges), tuple(gradients), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def saved_value(node: Node, name: str) -> Any:
    """A non-tensor that a node of the graph has saved, such as a shape or a factor. torch documents these attributes
    for looking at a graph, but names them as private."""
    return getattr(node, f"_saved_{name}")


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """A tensor that a node of the graph has saved, if it is still what was saved. None if hooks hold it: the hooks of
    torch's checkpoints give it out once in a backward, and the node needs it itself. Where torch doesn't
    report it, hooks are taken to hold it."""
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", "not told") is not None:
        return None
    saved: Tensor | None = getattr(node, f"_saved_{name}")
    return saved


def shape_of_result(node: Node) -> torch.Size:
    """The shape of the first tensor that the operation of a node of the graph has returned."""
    return torch.Size(_metadata(node)[0].shape)


def like_edge(edge: GradientEdge) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Shape, dtype and device that a gradient for an edge of a graph has to have. The tensor it belongs to may be
    gone."""
    like = _metadata(edge.node)[edge.output_nr]
    return torch.Size(like.shape), like.dtype, like.device


def where_created(node: Node) -> list[str]:
    """The lines of code that a node of the graph comes from, the outermost first, if it was made under
    ``torch.autograd.set_detect_anomaly``. They have no public name in torch."""
    metadata: Any = node.metadata  # torch declares it as a method, and makes it a dictionary
    lines: list[str] = metadata.get("traceback_", [])
    return lines


def shape_of_operand(node: Node, operand: int) -> torch.Size | None:
    """The shape of an operand of a node of the graph; None if it needs no gradient."""
    following, output = node.next_functions[operand]
    return None if following is None else torch.Size(_metadata(following)[output].shape)


def _metadata(node: Node) -> list[Any]:
    """The metadata (shape, dtype, device) of a node's incoming gradients. torch documents it, but names it as
    private."""
    return node._input_metadata


def hooks_beside(handle: RemovableHandle) -> int:
    """How many hooks of the same kind there are on a node of the graph beside the one that ``handle`` removes. The node
    itself doesn't report them."""
    hooks = handle.hooks_dict_ref()
    return 0 if hooks is None else len(hooks) - 1


def memory_is_shared(tensor: Tensor) -> bool:
    """Do other tensors refer to this one's memory? Also True if that isn't known. No public name counts references."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return True
    own = 2  # references: the tensor's, and that of the storage object made here
    shared: bool = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > own
    return shared
