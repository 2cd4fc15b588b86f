"""How dimensions are divided: every row once, in torch's pieces, fused parts each by itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.ranks.shard import Shard, piece


def shards(shape: tuple[int, ...], dim: int, count: int, parts: tuple[int, ...] = ()) -> list[Shard]:
    return [Shard.of(shape, dim, dist.ProcessGroup(rank, count), parts) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_pieces_are_those_of_torch_chunk_and_empty_where_it_has_none(count: int) -> None:
    for size in range(1, 30):
        whole = torch.arange(size)
        expected = [each.tolist() for each in whole.chunk(count)]
        expected += [[]] * (count - len(expected))
        assert [whole[slice(*piece(size, index, count))].tolist() for index in range(count)] == expected


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_joined_are_the_whole_and_have_memory_of_their_own(dim: int) -> None:
    whole = torch.randn(5, 7, 8)
    for count in (1, 3):
        cut = shards((5, 7, 8), dim, count)
        taken = [shard.take(whole) for shard in cut]
        assert all(shard.dim == dim % 3 and shard.size == x.shape[dim] for shard, x in zip(cut, taken, strict=True))
        assert torch.equal(torch.cat(taken, dim), whole)
        assert all(x.untyped_storage().nbytes() == x.nbytes and x.data_ptr() != whole.data_ptr() for x in taken)


def test_fused_parts_are_divided_one_by_one() -> None:
    whole = torch.arange(12)
    assert [shard.take(whole).tolist() for shard in shards((12,), 0, 2, (4, 4, 4))] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    uneven = shards((12,), 0, 3, (7, 5))
    assert [shard.ranges() for shard in uneven] == [[(0, 3), (7, 9)], [(3, 6), (9, 11)], [(6, 7), (11, 12)]]
    assert [shard.size for shard in uneven] == [5, 5, 2]


def test_a_part_of_which_a_rank_would_hold_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="dimension of 1 can't be divided over 2"):
        shards((9, 3), 0, 2, (8, 1))
