"""The schedules that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightning_parallel.schedules.generators import Generator, gpipe, interleaved, naive, one_f_one_b
from lightning_parallel.schedules.v_shaped import vhalf, vmin, zbv

SCHEDULES: Mapping[str, Generator] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zbv": zbv,
        "vhalf": vhalf,
        "vmin": vmin,
    }
)
