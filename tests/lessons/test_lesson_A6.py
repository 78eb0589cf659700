"""Appendix A6: no picture is lost, doubled or changed unnoticed; no worker outlives its reader."""

import io
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from support.processes import LIMIT, ended, patience
from torch.utils.data import DataLoader

from amp_utils.course.notebook import load

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
CLASSES = ("disc", "square", "cross")


@pytest.fixture(scope="module")
def lesson():
    module = load("A6", device=torch.device("cpu"), seed=0, workers=2)
    assert module.CLASSES == CLASSES
    with pytest.MonkeyPatch.context() as patch:  # a worker's error names its module in a pickle
        patch.setitem(sys.modules, module.__name__, module)
        yield module


def png(pixels: np.ndarray) -> bytes:
    """An RGB picture as a PNG file, written by hand: the least that the format asks for."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def random_pixels(seed: int = 0, shape: tuple[int, ...] = (5, 7, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


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
    """Three tar files of four pictures."""
    paths = [folder / f"shard-{k}.tar" for k in range(3)]
    for k, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for picture in sorted(folder.glob("*/*.png"))[k::3]:
                tar.add(picture, arcname=f"{picture.parent.name}/{picture.name}")
    return paths


@each("shape", CLASSES)
def test_a_drawn_shape_is_bright_in_every_colour_and_never_wraps_around(lesson, shape):
    for seed in range(50):
        picture = lesson.draw(shape, np.random.default_rng(seed))
        assert picture.dtype == np.uint8 and picture.shape == (32, 32, 3)
        bright = picture >= 80
        assert (bright == bright[..., :1]).all() and 0 < bright[..., 0].sum() < 32 * 32 / 1.5


def test_a_disc_is_in_its_square_and_around_its_cross(lesson):
    masks = {shape: lesson.draw(shape, np.random.default_rng(3))[..., 0] >= 80 for shape in CLASSES}
    assert (masks["square"] >= masks["disc"]).all() and (masks["square"] >= masks["cross"]).all()
    assert masks["square"].sum() > masks["disc"].sum() > masks["cross"].sum()


def test_decode_gives_the_bytes_that_another_encoder_wrote(lesson):
    pixels = random_pixels()
    decoded = lesson.decode(png(pixels), "x")
    assert decoded.dtype == torch.uint8 and decoded.is_contiguous()
    assert (decoded.permute(1, 2, 0).numpy() == pixels).all()
    every_level = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    assert (lesson.decode(png(every_level), "x").permute(1, 2, 0).numpy() == every_level).all()


def test_every_damaged_bit_and_every_cut_is_refused_by_name(lesson):
    data = png(random_pixels())
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(lesson.DataError, match=r"^cross/7\.png cannot be read: .+\.$"):
            lesson.decode(bytes(damaged), "cross/7.png")
    for size in range(len(data)):
        with pytest.raises(lesson.DataError, match=r"^cross/7\.png cannot be read: .+\.$"):
            lesson.decode(data[:size], "cross/7.png")


def test_what_is_no_colour_picture_is_refused(lesson):
    grey = io.BytesIO()
    matplotlib.image.imsave(grey, np.zeros((4, 4)))
    assert lesson.decode(grey.getvalue(), "x").shape == (3, 4, 4)  # a colour map made colours of it
    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)  # 0: grey
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts
    ]
    with pytest.raises(lesson.DataError, match="not a colour picture"):
        lesson.decode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), "x")


def test_the_folder_dataset_is_a_sequence_in_a_fixed_order(lesson, folder):
    dataset = lesson.FolderDataset(folder)
    assert len(dataset) == len(list(dataset)) == 12
    assert [label for _, label in dataset] == [2] * 4 + [0] * 4 + [1] * 4  # cross, disc, square
    assert torch.equal(dataset[0][0], torch.from_numpy(random_pixels(2)).permute(2, 0, 1))
    with pytest.raises(IndexError):
        dataset[12]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@each("workers, count", [(1, 3), (2, 3), (3, 2), (4, 3)])
def test_sharded_by_worker_every_picture_comes_once_and_unsharded_once_a_worker(
    lesson, shards, workers, count
):
    options = {"batch_size": 3, "num_workers": workers, "multiprocessing_context": "fork"}
    names = sorted(name for shard in shards[:count] for name, _ in lesson.read_tar(shard))
    once = [
        n
        for _, _, batch in DataLoader(lesson.ShardedTarDataset(shards[:count]), **options)
        for n in batch
    ]
    assert sorted(once) == names
    often = Counter(
        n for _, _, batch in DataLoader(lesson.TarDataset(shards[:count]), **options) for n in batch
    )
    assert often == {name: workers for name in names}


def test_no_cut_of_an_archive_goes_unnoticed(lesson, shards):
    whole, complete = shards[0].read_bytes(), list(lesson.read_tar(shards[0]))
    assert len(complete) == 4
    for size in {*range(0, len(whole), 512), *range(0, len(whole), 97)}:
        shards[0].write_bytes(whole[:size])
        try:
            assert list(lesson.read_tar(shards[0])) == complete, f"cut at {size}"
        except lesson.DataError as error:
            assert str(error).startswith("shard-0.tar is not whole: ") and "\n" not in str(error)
        else:
            assert not any(whole[size:]), "only padding may be missing"


def test_a_damaged_header_does_not_end_an_archive_silently(lesson, shards):
    whole, complete = shards[0].read_bytes(), list(lesson.read_tar(shards[0]))
    refused = 0
    for place in range(0, len(whole), 41):
        shards[0].write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            got = list(lesson.read_tar(shards[0]))
        except lesson.DataError:
            refused += 1
        else:
            assert [name for name, _ in got] == [name for name, _ in complete], f"byte {place}"
    assert refused > 20


def test_an_empty_archive_is_whole(lesson, tmp_path):
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    assert list(lesson.read_tar(tmp_path / "empty.tar")) == []


def test_a_worker_names_the_damaged_file_and_goes_when_the_error_goes(lesson, folder):
    (folder / "disc" / "2.png").write_bytes(b"not a picture")
    try:
        list(DataLoader(lesson.FolderDataset(folder), **FORK))
    except lesson.DataError as error:
        assert (
            lesson.last_line(error)
            == "disc/2.png cannot be read: it does not begin like a PNG file."
        )
        error.__traceback__ = None
    else:
        pytest.fail("the damaged file was read")
    assert multiprocessing.active_children() == []


def test_reseeded_workers_differ_from_each_other_and_from_epoch_to_epoch(lesson):
    loader = DataLoader(lesson.Dice(), batch_size=None, worker_init_fn=lesson.reseed, **FORK)
    own = [item[2] for _ in range(3) for item in loader]
    assert len(set(own)) == 6
    plain = DataLoader(lesson.Dice(), batch_size=None, **FORK)
    assert len({item[2] for _ in range(3) for item in plain}) == 1  # what reseed cures


def test_to_device_maps_bytes_to_floats_between_minus_one_and_one(lesson):
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    inputs, labels = lesson.to_device(levels, torch.tensor([1]))
    assert inputs.dtype == torch.float32 and labels.dtype == torch.int64
    np.testing.assert_allclose(inputs.numpy().ravel(), np.linspace(-1, 1, 256), atol=1e-6)


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="counts open files where the system lists them"
)
def test_epochs_leave_no_process_no_open_file_and_no_shared_memory(lesson, folder):
    dataset, pids = lesson.FolderDataset(folder), []

    def open_files() -> int:
        for _ in range(2):
            assert sum(len(labels) for _, labels in DataLoader(dataset, batch_size=2, **FORK)) == 12
        for _ in DataLoader(dataset, batch_size=2, **FORK):
            pids.extend(worker.pid for worker in multiprocessing.active_children())
            break
        return len(os.listdir("/proc/self/fd"))

    counts = [open_files() for _ in range(6)]
    # An abandoned epoch may close its files a moment later; a leak grows in every later round.
    assert min(counts[2:]) <= max(counts[:2]), f"open files after each round: {counts}"
    assert multiprocessing.active_children() == []
    assert len(pids) == 12 and not [
        block for pid in pids for block in Path("/dev/shm").glob(f"torch_{pid}_*")
    ]


@pytest.mark.full
def test_the_script_of_the_lesson_runs_where_workers_are_not_forked_from_it(lesson, folder):
    assert lesson.SCRIPT.count('"spawn"') == 1
    (folder / "train.py").write_text(lesson.SCRIPT.replace('"spawn"', '"forkserver"'))
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr


KILLED = """
import multiprocessing, time
from torch.utils.data import DataLoader
batches = iter(DataLoader(range(100), num_workers=2, multiprocessing_context="fork"))
next(batches), next(batches)  # one of each worker: only a worker at work knows its parent
print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
time.sleep(1000)
"""


@pytest.mark.full  # workers look for their parent every five seconds
def test_workers_go_when_their_reader_is_killed():
    command = [sys.executable, "-c", KILLED]
    with patience(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        workers = [int(number) for number in reader.stdout.readline().split()]
        reader.kill()
    assert len(workers) == 2 and ended(*workers)


@given(count=st.integers(0, 40), world=st.integers(1, 4), workers=st.integers(1, 4))
def test_share_deals_every_shard_once(lesson, count, world, workers):
    parts = [
        lesson.share(list(range(count)), r, world, w, workers)
        for r in range(world)
        for w in range(workers)
    ]
    assert sorted(sum(parts, [])) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(items=st.lists(st.integers()), size=st.integers(1, 50), seed=st.integers(0, 1000))
def test_shuffled_gives_every_item_once_and_reads_no_further_than_its_buffer(
    lesson, items, size, seed
):
    taken = 0

    def stream():
        nonlocal taken
        for item in items:
            taken += 1
            yield item

    got = []
    for item in lesson.shuffled(stream(), size, random.Random(seed)):
        assert taken <= len(got) + size
        got.append(item)
    assert Counter(got) == Counter(items)


def test_shuffled_can_bring_any_item_of_its_buffer_first(lesson):
    first = {next(lesson.shuffled(iter(range(20)), 4, random.Random(seed))) for seed in range(100)}
    assert first == {0, 1, 2, 3}


def test_flips_are_even_and_repeatable(lesson):
    table = np.array(
        [[lesson.flips(5, epoch, index) for index in range(500)] for epoch in range(4)]
    )
    assert (abs(table.mean(1) - 0.5) < 0.1).all() and (
        abs(np.corrcoef(table) - np.eye(4)) < 0.2
    ).all()
    assert lesson.flips(5, 1, 3) is lesson.flips(5, 1, 3) and type(lesson.flips(5, 1, 3)) is bool


def test_matplotlib_alone_takes_some_damaged_pictures_for_good_ones(lesson):
    file = io.BytesIO()
    matplotlib.image.imsave(file, lesson.draw("disc", np.random.default_rng(0)))
    data, passed = file.getvalue(), 0
    for place in range(len(data) - 80, len(data) - 16):
        damaged = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
        try:
            pixels = matplotlib.image.imread(io.BytesIO(damaged), format="png")
        except (OSError, SyntaxError):
            continue
        passed += (pixels != matplotlib.image.imread(io.BytesIO(data))).any()
        with pytest.raises(lesson.DataError):
            lesson.decode(damaged, "x")
    assert passed, "then the lesson need not check the checksums itself"
