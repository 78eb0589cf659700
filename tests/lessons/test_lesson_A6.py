"""Appendix A6: no picture is lost, doubled or changed; no worker or thread outlives its reader."""

import multiprocessing
import struct
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

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
def shards(folder) -> list[Path]:
    """Three tar files of four pictures each."""
    for k in range(3):
        with tarfile.open(folder / f"shard-{k}.tar", "w") as tar:
            for picture in sorted(folder.glob("*/*.png"))[k::3]:
                tar.add(picture, arcname=f"{picture.parent.name}/{picture.name}")
    return sorted(folder.glob("shard-*.tar"))


def test_a_drawn_shape_is_bright_in_every_colour_and_never_wraps_around(lesson):
    for seed in range(20):
        areas = {}
        for shape in CLASSES:
            bright = lesson.draw(shape, np.random.default_rng(seed)) >= 80
            assert bright.shape == (64, 64, 3) and (bright == bright[..., :1]).all()
            areas[shape] = bright[..., 0].sum()
        assert 64 * 64 > areas["square"] > areas["disc"] > areas["cross"] > 0


def test_the_folder_dataset_gives_the_bytes_of_another_encoder_in_a_fixed_order(lesson, folder):
    dataset = lesson.FolderDataset(folder)
    assert [label for _, label in dataset] == [2] * 4 + [0] * 4 + [1] * 4  # cross, disc, square
    for (picture, _), seed in zip(dataset, [2, 5, 8, 11, 0, 3, 6, 9, 1, 4, 7, 10], strict=True):
        assert picture.dtype == torch.uint8 and picture.is_contiguous()
        assert (picture.permute(1, 2, 0).numpy() == random_pixels(seed)).all()


@pytest.mark.parametrize("load, step, cores", [(24, 12, 8), (25, 10, 8), (10, 30, 4), (24, 5, 2)])
def test_a_plan_is_the_least_count_that_a_simulation_needs(lesson, load, step, cores):
    def pace(count: int) -> float:
        """Milliseconds a batch: `count` workers load one after another, the loop takes in turn."""
        free, now, ends = [load * k / count for k in range(count)], 0.0, []
        for i in range(400):
            free[i % count] += load
            now = max(now, free[i % count]) + step
            ends.append(now)
        return (ends[-1] - ends[199]) / 200

    paces = {count: pace(count) for count in range(1, cores + 1)}
    best = min(paces.values())
    count = next(count for count, ms in paces.items() if ms == pytest.approx(best))
    assert lesson.plan(load, step, cores) == (count, pytest.approx(best))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_sharded_by_worker_every_picture_comes_once_and_unsharded_once_a_worker(lesson, shards):
    names = [f"{shape}/{i}.png" for shape in CLASSES for i in range(4)]
    assert lesson.times_seen(DataLoader(lesson.ShardedTarDataset(shards), 3, **FORK)) == Counter(
        names
    )
    assert lesson.times_seen(DataLoader(lesson.TarDataset(shards), 3, **FORK)) == Counter(names * 2)


@pytest.mark.parametrize("drop_last, sizes", [(False, [3, 3, 3, 1, 2]), (True, [3, 3, 3])])
def test_each_worker_makes_a_last_batch_of_its_own(lesson, shards, drop_last, sizes):
    """Twelve pictures would fill four batches; but one worker reads eight, and the other four."""
    loader = DataLoader(lesson.ShardedTarDataset(shards), 3, drop_last=drop_last, **FORK)
    assert [len(names) for _, _, names in loader] == sizes


class Told(IterableDataset):
    """Yields what it knows of the epoch: from an attribute, and from shared memory."""

    def __init__(self):
        self.epoch, self.shared = 0, torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self):
        yield self.epoch, self.shared.item()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_persistent_workers_miss_a_later_epoch_but_read_shared_memory(start):
    told, heard = Told(), []
    options = FORK | {"multiprocessing_context": start, "persistent_workers": True}
    loader = DataLoader(told, batch_size=None, **options)
    for epoch in (1, 2, 3):
        told.epoch = epoch
        told.shared.fill_(epoch)
        heard.append(list(loader))
    assert heard == [[[1, 1]] * 2, [[1, 2]] * 2, [[1, 3]] * 2]


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


def test_clocks_tell_waiting_from_computing(lesson, monkeypatch):
    now = iter([10.0, 12.0, 13.0, 17.0, 18.5, 18.5])  # came, done, came, done, came, done
    monkeypatch.setattr(lesson.time, "perf_counter", lambda: next(now))
    assert lesson.clocks("abc", lambda items: None) == {"computing": 2000.0, "waiting": 1250.0}


def test_fastest_keeps_the_epoch_with_the_smallest_sum(lesson, monkeypatch):
    times = iter([(5.0, 3.0), (1.0, 6.0), (4.0, 4.0)])
    monkeypatch.setattr(
        lesson, "clocks", lambda *_: dict(zip(("computing", "waiting"), next(times), strict=True))
    )
    assert lesson.fastest(None, None) == {"computing": 1.0, "waiting": 6.0}
