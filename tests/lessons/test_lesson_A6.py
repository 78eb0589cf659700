"""Appendix A6: no picture is lost, doubled or changed unnoticed; no worker outlives its reader."""

import multiprocessing
import random
import struct
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.each import each
from torch.utils.data import DataLoader

from amp_utils.course.notebook import load

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
CLASSES = ("disc", "square", "cross")


@pytest.fixture(scope="module")
def lesson():
    return load("A6", device=torch.device("cpu"), seed=0, workers=2, batch=3, FORK=FORK)


def png(pixels: np.ndarray) -> bytes:
    """An RGB picture as a PNG file, written by hand: the least that the format asks for."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    height, width, _ = pixels.shape
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels)))
    return b"\x89PNG\r\n\x1a\n" + head + rows + chunk(b"IEND", b"")


def random_pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four pictures of each class."""
    for i, shape in enumerate(CLASSES * 4):
        path = tmp_path / shape / f"{i // 3}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(random_pixels(i)))
    return tmp_path


@pytest.fixture
def shards(lesson, folder) -> list[Path]:
    """Three tar files of four pictures, and the manifest that goes with them."""
    lesson.manifest = {}
    for k in range(3):
        pictures = sorted(folder.glob("*/*.png"))[k::3]
        names = {p: f"{p.parent.name}/{p.name}" for p in pictures}
        with tarfile.open(folder / f"shard-{k}.tar", "w") as tar:
            for picture in pictures:
                tar.add(picture, arcname=names[picture])
        checksums = {names[p]: zlib.crc32(p.read_bytes()) for p in pictures}
        lesson.manifest[f"shard-{k}.tar"] = checksums
    return sorted(folder.glob("shard-*.tar"))


def test_a_drawn_shape_is_bright_in_every_colour_and_never_wraps_around(lesson):
    for seed in range(20):
        areas = {}
        for shape in CLASSES:
            bright = lesson.draw(shape, np.random.default_rng(seed)) >= 80
            assert bright.shape == (32, 32, 3) and (bright == bright[..., :1]).all()
            areas[shape] = bright[..., 0].sum()
        assert 32 * 32 > areas["square"] > areas["disc"] > areas["cross"] > 0


def test_the_folder_dataset_gives_the_bytes_of_another_encoder_in_a_fixed_order(lesson, folder):
    dataset = lesson.FolderDataset(folder)
    assert [label for _, label in dataset] == [2] * 4 + [0] * 4 + [1] * 4  # cross, disc, square
    for (picture, _), seed in zip(dataset, [2, 5, 8, 11, 0, 3, 6, 9, 1, 4, 7, 10], strict=True):
        assert picture.dtype == torch.uint8 and picture.is_contiguous()
        assert (picture.permute(1, 2, 0).numpy() == random_pixels(seed)).all()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_sharded_by_worker_every_picture_comes_once_and_unsharded_once_a_worker(lesson, shards):
    names = [name for shard in shards for name in lesson.manifest[shard.name]]
    assert lesson.times_seen(lesson.ShardedTarDataset(shards), **FORK) == Counter(names)
    assert lesson.times_seen(lesson.TarDataset(shards), **FORK) == Counter(names * 2)


def test_every_cut_and_every_flipped_bit_of_an_archive_is_found_by_name(lesson, shards):
    path, whole = shards[0], shards[0].read_bytes()
    good = lesson.checksums(lesson.read_tar(path))
    assert good == {name: lesson.manifest[path.name][name] for name in good} and len(good) == 4
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    spans = [range(m.offset_data, m.offset_data + m.size) for m in members]

    def bad(content: bytes) -> list[str]:
        path.write_bytes(content)
        return sorted(dict(good.items() - lesson.checksums(lesson.read_tar(path)).items()))

    names = [member.name for member in members]
    for size in range(0, spans[-1].stop, 211):
        assert bad(whole[:size]) == sorted(
            name for name, span in zip(names, spans, strict=True) if span.stop > size
        ), f"cut at {size}"
    for name, span in zip(names, spans, strict=True):
        for place in range(span.start, span.stop, 47):
            assert bad(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]) == [name]


def test_a_shuffled_stream_of_two_ranks_brings_every_picture_once_in_each_epoch(lesson, shards):
    lesson.shard_paths = shards
    streams = [lesson.loader_of(rank) for rank in (0, 1)]
    orders = []
    for _ in range(3):
        names = [[name for *_, some in stream for name in some] for stream in streams]
        assert sorted(names[0] + names[1]) == sorted(n for s in lesson.manifest.values() for n in s)
        orders.append(names)
    del streams
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert len({frozenset(names[0]) for names in orders}) > 1  # other shards for a rank


def test_reseeded_workers_differ_from_each_other_and_from_epoch_to_epoch(lesson):
    def own(**options) -> list[float]:
        loader = DataLoader(lesson.Dice(), batch_size=None, **FORK, **options)
        return [item[3] for _ in range(2) for item in loader]

    assert len(set(own(worker_init_fn=lesson.reseed))) == 4
    assert len(set(own())) == 1  # what reseed cures


def test_an_epoch_and_half_of_one_leave_no_worker(lesson, folder):
    loader = DataLoader(lesson.FolderDataset(folder), batch_size=2, **FORK)
    assert sum(len(labels) for _, labels in loader) == 12
    for _ in loader:
        assert len(multiprocessing.active_children()) == 2
        break
    assert multiprocessing.active_children() == []


def test_to_device_maps_bytes_to_floats_between_minus_one_and_one(lesson):
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    inputs, labels = lesson.to_device(levels, torch.tensor([1]))
    assert inputs.dtype == torch.float32 and labels.dtype == torch.int64
    np.testing.assert_allclose(inputs.numpy().ravel(), np.linspace(-1, 1, 256), atol=1e-6)


@each("length, size", [(0, 3), (1, 1), (20, 4), (20, 1), (5, 50)])
def test_shuffled_gives_every_item_once_and_reads_no_further_than_its_buffer(lesson, length, size):
    taken = []

    def stream():
        for item in range(length):
            taken.append(item)
            yield item

    for seed in range(20):
        taken.clear()
        got = []
        for item in lesson.shuffled(stream(), size, random.Random(seed)):
            assert len(taken) <= len(got) + size + 1
            got.append(item)
        assert sorted(got) == list(range(length))


def test_shuffled_can_bring_any_item_of_its_buffer_first(lesson):
    first = {next(lesson.shuffled(iter(range(20)), 4, random.Random(seed))) for seed in range(100)}
    assert first == {0, 1, 2, 3, 4}
