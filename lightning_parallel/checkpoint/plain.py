"""A checkpoint as one process has it, whatever wrote it: a directory of any layout, a file, or safetensors.

A file is what Lightning saves in one process: a dictionary. A directory is read into the same dictionary::

    state_dict          every tensor as a whole; tied ones under all their names
    current_model_state the same, of the weights, where a callback has saved averages of them as the state_dict
    optimizer_states    a parameter's state under its number in the optimizer's groups, as optimizers number them
    lr_schedulers, loops, callbacks, hyper_parameters, ...      from trainer.pt, as they are
    random_states       of generators, one for each replica

Nothing here is a collective: each process reads for itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.directory import PathLike, replacing
from lightning_parallel.checkpoint.keys import MODEL, SECOND, OptimizerState, below, joined, of_replicas, parameter_of
from lightning_parallel.checkpoint.reading import Reader, read_file
from lightning_parallel.checkpoint.slices import empty_like, fill

SAFETENSORS = ".safetensors"
OF_TENSORS = ("state_dict", "optimizer_states")
WEIGHTS = "current_model_state"
RANDOM_STATES = "random_states"

# -- a directory as a dictionary ---------------------------------------------------------------------------------


def read_plain(path: PathLike, weights_only: bool = True) -> dict[str, Any]:
    """Everything in a directory or a file, as Lightning reads it in one process. Tensors are on the CPU.

    Args:
        path: a directory, or a file that ``torch.save`` has written.
        weights_only: refuse anything but tensors and plain containers. Turn it off for files that you trust.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it holds what ``weights_only`` forbids.
    """
    if Path(path).is_file():
        return read_file(Path(path), Path(path), weights_only)
    content = PlainOnDemand(path, weights_only)
    content.complete()
    return dict(content)


class PlainOnDemand(dict[str, Any]):
    """A directory as :func:`read_plain` reads it, but tensors are read, whole, only when one is accessed. ``saved`` is
    the content of its trainer.pt."""

    def __init__(self, path: PathLike, weights_only: bool = True) -> None:
        self.reader = Reader(path)
        self.saved = self.reader.trainer(weights_only)
        super().__init__(self.saved["trainer"])
        self._on_demand = {"state_dict"}
        if "lr_schedulers" in self.saved["trainer"]:  # else only the weights were saved
            self._on_demand.add("optimizer_states")
        if below(SECOND, self.reader.found):
            self._on_demand.add(WEIGHTS)

    @property
    def is_touched(self) -> bool:
        """Have tensors been read or set?"""
        return any(dict.__contains__(self, key) for key in OF_TENSORS)

    def complete(self) -> None:
        """Read the tensors that haven't been read or set."""
        found, saved, aliases = self.reader.found, self.saved, self.reader.contents["aliases"]
        replicas = of_replicas(found)
        generators = [of_one.values() for of_one in replicas.values()]
        tensors = _read(self.reader, (*filter(parameter_of, found), *chain.from_iterable(generators)))
        self.setdefault("state_dict", _state_dict(aliases, tensors) | saved["extra_state"])
        if WEIGHTS in self:
            self.setdefault(WEIGHTS, _state_dict(aliases, tensors, SECOND) | saved["extra_state"])
        if "optimizer_states" in self:
            pairs = zip(joined(tensors, saved["optimizer_scalars"]), saved["param_groups"], strict=True)
            self.setdefault("optimizer_states", [_numbered(state, groups) for state, groups in pairs])
        if replicas:
            in_order = sorted(replicas, key=lambda replica: (len(replica), replica))  # dp2 before dp10
            states = [{name: tensors[key] for name, key in replicas[each].items()} for each in in_order]
            self.setdefault(RANDOM_STATES, states)

    def __missing__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        self.complete()
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._on_demand or super().__contains__(key)

    get = Mapping.get  # type: ignore[assignment]  # that of dictionaries knows no __missing__


def read_full(path: PathLike, weights_only: bool = True) -> dict[str, Tensor]:
    """The whole model's state dict, on the CPU, in one process, without a model or a process group.

    Args:
        path: a checkpoint's directory, a plain ``.ckpt``, or a file of safetensors.

    Returns:
        Tensors by name, and what modules keep besides (``get_extra_state``). Tied ones are there under all their
        names, as in ``module.state_dict()``.

    Raises:
        ValueError: there is no checkpoint, or it holds other things than tensors.
    """
    if os.fspath(path).endswith(SAFETENSORS):
        return _read_safetensors(Path(path))
    if Path(path).is_file():
        content = read_file(Path(path), Path(path), weights_only)
        return dict(content.get("state_dict", content))
    reader = Reader(path)
    state_dict = _state_dict(reader.contents["aliases"], _read(reader, below(MODEL, reader.found).values()))
    if reader.contents["extra_state"]:
        state_dict |= reader.trainer(weights_only)["extra_state"]
    return state_dict


def _read(reader: Reader, keys: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors by their keys."""
    tensors = {key: empty_like(reader.found[key], reader.found[key].dtype) for key in keys}
    reader.check(tensors)
    reader.fill(tensors)
    return tensors


def _state_dict(aliases: Mapping[str, str], tensors: Mapping[str, Tensor], prefix: str = MODEL) -> dict[str, Tensor]:
    """The model's tensors among those of a checkpoint, tied ones under all their names."""
    held = {name: tensors[key] for name, key in below(prefix, tensors).items()}
    return held | {name: held[first] for name, first in aliases.items() if first in held}


def _numbered(state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's ``state_dict()``, where parameters are numbered in the order of its groups."""
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: dict(values) for name, values in state.items() if name in numbers},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


# -- as one file --------------------------------------------------------------------------------------------------


def convert(source: PathLike, target: PathLike, *, save_weights_only: bool = False, weights_only: bool = True) -> None:
    """Write the content of a checkpoint into one file: weights as safetensors, if the target's name ends so, or else a
    plain ``.ckpt``, as Lightning writes in one process. It takes one process, and memory for all of it. There is no way
    back into a directory: every strategy reads a plain file as it is.

    Args:
        source: a directory, a plain ``.ckpt``, or safetensors.
        target: the path to write to. A file or a checkpoint that is there is replaced.
        save_weights_only: write the weights only.
        weights_only: refuse a source that holds more than tensors and plain containers: unpickling other objects can
            run code. Turn it off for files that you trust.

    Raises:
        ValueError: the source is missing or damaged, or the target is a folder of something else.
    """
    source, target = Path(source), Path(target)
    if save_weights_only or SAFETENSORS in (source.suffix, target.suffix):
        content: dict[str, Any] = {"state_dict": read_full(source, weights_only)}
    else:
        content = read_plain(source, weights_only)
    if target.suffix == SAFETENSORS:
        others = [name for name, each in content["state_dict"].items() if not isinstance(each, Tensor)]
        if others:
            raise ValueError(f"{others[0]} in {source} is no tensor, and safetensors hold nothing else.")
    with replacing(target) as new:
        if target.suffix == SAFETENSORS:
            _write_safetensors(new, content["state_dict"])
        else:
            torch.save(content, new)


# -- a dictionary as a directory ---------------------------------------------------------------------------------


def by_name(states: Sequence[Mapping[str, Any]], names: Sequence[Sequence[Sequence[str]]]) -> list[OptimizerState]:
    """The optimizers' states of a plain checkpoint by the names of the parameters, which it numbers. ``names`` has
    these names for each optimizer and group.

    Raises:
        ValueError: there are other numbers than names.
    """
    named = []
    for index, (state, groups) in enumerate(zip(states, names, strict=True)):
        flat = [name for group in groups for name in group]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if len(flat) != len(numbers) or not set(numbers) >= state["state"].keys():
            raise ValueError(
                f"The checkpoint's optimizer {index} has {len(numbers)} parameters and {len(state['state'])} states, "
                f"which don't fit the {len(flat)} names of its parameters."
            )
        by_number = dict(zip(numbers, flat, strict=True))
        options = [{**group, "params": [by_number[n] for n in group["params"]]} for group in state["param_groups"]]
        named.append(OptimizerState({by_number[n]: values for n, values in state["state"].items()}, options))
    return named


class Wholes:
    """A plain checkpoint's tensors, from which a rank reads its part as from a directory. ``found`` has them by their
    keys in a directory. One that a rank is to fill may be its own, and stays as it is."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        self.found = found

    def check(self, tensors: dict[str, Tensor]) -> None:
        """They are in memory."""

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, or a rank's shards of them, by their keys."""
        with torch.no_grad():
            for key, tensor in tensors.items():
                if tensor is not self.found[key]:
                    fill(tensor, self.found[key])


# -- safetensors, the format in which models are shared: each tensor once, the further names of tied ones in the header


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    library = _safetensors()
    try:
        with library.safe_open(path, "pt") as file:
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}.") from None
    except library.SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no file of safetensors: {error}.") from error
    return tensors | {name: tensors[held] for name, held in aliases.items()}


def _write_safetensors(path: Path, state_dict: Mapping[str, Tensor]) -> None:
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_dict.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if (held := first.setdefault(same, name)) != name:
            aliases[name] = held
    tensors = {name: tensor.contiguous() for name, tensor in state_dict.items() if name not in aliases}
    _safetensors().torch.save_file(tensors, path, {"format": "pt", "aliases": json.dumps(aliases)})


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"*{SAFETENSORS} needs the package safetensors: pip install safetensors.") from error
    return safetensors
