from __future__ import annotations

from minisgl.engine.decode_graphs import cascade_sizes, graph_sizes


def test_sizes_are_dense_and_end_with_the_largest() -> None:
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(10) == [1, 2, 3, 4, 6, 8, 10]
    assert graph_sizes(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert graph_sizes(300)[-4:] == [256, 272, 288, 300]
    assert len(graph_sizes(512)) == 54


def test_padding_of_large_batches_is_small() -> None:
    sizes = graph_sizes(1000)
    for rows in range(64, 1001):
        assert min(size for size in sizes if size >= rows) - rows <= rows * 0.125


def test_graphs_for_shared_prefixes_are_few() -> None:
    assert cascade_sizes(0) == []
    assert cascade_sizes(24) == [24]
    assert cascade_sizes(256) == [32, 64, 96, 128, 160, 192, 224, 256]
    assert cascade_sizes(700)[-5:] == [384, 448, 512, 640, 700]
