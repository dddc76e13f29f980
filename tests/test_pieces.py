"""Pieces that are rows, columns, other slices or flat stretches make up the same tensor."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_checkpoints import MOMENTS, FakeStrategy
from zerobook.checkpoint import save, state, store
from zerobook.checkpoint.merge import boxes, merge
from zerobook.checkpoint.progress import Progress
from zerobook.errors import CheckpointError
from zerobook.strategy import Piece

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def partitions(draw, shape):
    """(offset, values' shape) of slices, and (offset,) of stretches, that make up a tensor."""
    rows = draw(st.integers(0, shape[0])) if len(shape) > 1 else shape[0]  # of them stretches, the others slices
    found, size = [], rows * math.prod(shape[1:])
    ends = sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=4))})
    found += [((start,), (stop - start,)) for start, stop in itertools.pairwise(ends)]
    left = [((rows, *[0] * (len(shape) - 1)), (shape[0] - rows, *shape[1:]))] if rows < shape[0] else []
    for _ in range(draw(st.integers(0, 4)) if left else 0):
        offset, size = left.pop(draw(st.integers(0, len(left) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[d]))
        for start, length in ((0, at), (at, size[d] - at)):
            if length:
                part = (*size[:d], length, *size[d + 1 :])
                left.append(((*offset[:d], offset[d] + start, *offset[d + 1 :]), part))
    return draw(st.permutations(found + left))


def values_of(whole, offset, shape):
    if len(offset) == 1 and whole.dim() != 1:
        return whole.flatten()[offset[0] : offset[0] + shape[0]]
    return whole[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))]


@given(st.data(), SHAPES, st.booleans(), st.sampled_from([4, 1 << 22]))
@settings(max_examples=60)
def test_any_slices_are_assembled_into_the_same_tensor(tmp_path_factory, data, shape, background, room):
    torch.manual_seed(0)
    whole = {key: torch.randn(shape) for key in (None, *MOMENTS)}
    cuts = {key: data.draw(partitions(shape)) for key in whole}
    pieces = [Piece("w", key, offset, values_of(whole[key], offset, n)) for key in whole for offset, n in cuts[key]]
    strategy = FakeStrategy(0, [pieces])
    strategy.trainable = lambda: iter([("w", torch.zeros(shape))])
    strategy.on_main = lambda work: work()
    folder = tmp_path_factory.mktemp("run")
    before = save._FIRST_BLOCK, save._LARGEST_BLOCK
    save._FIRST_BLOCK = save._LARGEST_BLOCK = room
    try:
        saver = save.Saver(strategy, str(folder), keep=None, background=background)
        saver.save(Progress(step=1), {})
        saver.wait()
    finally:
        save._FIRST_BLOCK, save._LARGEST_BLOCK = before
    (saved,) = saver.results()
    assert saved.problem is None and store.find_damage(saved.checkpoint, thorough=True) is None
    slices = any(len(offset) > 1 for cut in cuts.values() for offset, _ in cut)
    assert store.read_json(saved.checkpoint / store.MANIFEST)["format_version"] == (5 if slices else 4)
    reader = state.Reader(saved.checkpoint)
    for key, tensor in whole.items():
        name = f"{key or 'weight'}/w"
        assert torch.equal(reader.read_tensor(name), tensor)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
        assert torch.equal(reader.read_into_buffer(name, start, stop), tensor.flatten()[start:stop])
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(data.draw(st.integers(1, n - at)) for at, n in zip(offset, shape, strict=True))
        assert torch.equal(state.TensorReader(reader, name).block(offset, size), values_of(tensor, offset, size))


@given(st.data(), SHAPES)
def test_a_stretch_is_made_up_of_its_boxes(data, shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    parts = [values_of(whole, offset, size).flatten() for offset, size in boxes(start, stop, shape)]
    assert torch.cat([whole.new_empty(0), *parts]).tolist() == list(range(start, stop))


@pytest.mark.parametrize(
    "entries",
    [
        [[[0, 0], [3, 2], "a"]], [[[0, 0], [3, 2], "a"], [[0, 2], [3, 1], "b"]], [[[0, 0], [3, 2], "a"], [[0, 1], [3, 2], "b"]],
        [[[0, 0], [3, 2], "a"], [[0, 2], [3, 3], "b"]], [[[0, 0], [3, 2], "a"], [0, 6, "b"]],
        [[[0, 0], [3, 4], "a"], [2, 3, "b"]],
        [[[0, 0, 0], [3, 2, 1], "a"], [[0, 2], [3, 2], "b"]],
    ],
)  # fmt: skip
def test_slices_that_lack_a_number_or_give_one_twice_are_refused(entries):
    with pytest.raises(CheckpointError, match="it has 12 numbers, and the ranks gave"):
        merge([{"weight/w": entries[:1]}, {"weight/w": entries[1:]}], {"weight/w": [3, 4]})
    columns = [[[0, 0], [3, 2], "a"], [[0, 2], [3, 2], "b"]]
    assert merge([{"weight/w": columns[1:]}, {"weight/w": columns[:1]}], {"weight/w": [3, 4]}) == {"weight/w": columns}


def test_the_shards_of_columns_are_slices_and_those_of_rows_stretches():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zerobook.strategy.fsdp import FullyShardedStrategy
    from zerobook.strategy.mesh import Mesh

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh, whole = DeviceMesh("cpu", [0, 1]), torch.arange(24.0).view(6, 4)
        meta = TensorMeta(whole.shape, (4, 1), torch.float32)

        class Read:
            def __call__(self, start, stop):
                return whole.flatten()[start:stop]

            def block(self, offset, shape):
                return values_of(whole, offset, shape)

        strategy = FullyShardedStrategy.__new__(FullyShardedStrategy)
        strategy.mesh = Mesh(SimpleNamespace(process_index=1, num_processes=2, is_main_process=False))
        for placement, mine, offset in ((Shard(0), whole[3:], (12,)), (Shard(1), whole[:, 2:], (0, 2))):
            tensor = DTensor(mine.clone(), DTensorSpec(mesh, (placement,), tensor_meta=meta), requires_grad=False)
            found, values = strategy._written_part(0, tensor, tensor.to_local())
            assert found == offset and torch.equal(values, values_of(whole, offset, values.shape))
            tensor.to_local().zero_()
            strategy.restore(tensor, None, Read())
            assert torch.equal(tensor.to_local(), mine)
    finally:
        dist.destroy_process_group()
