"""The device a lesson asks for is there, or one sentence says what is."""

import pytest
import torch
from support.each import each

from amp_utils import device
from amp_utils.lesson import ParameterError


@each("cuda, expected", [(False, "cpu"), (True, "cuda")])
def test_auto_takes_cuda_where_there_is_one(monkeypatch, cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert device.choose_device("auto") == torch.device(expected)


def test_choosing_twice_changes_nothing():
    assert device.choose_device(device.choose_device("cpu")) == torch.device("cpu")


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ParameterError, match="device = 'cuda' is not on this machine: give one of 'auto', 'cpu'"
    ):
        device.choose_device("cuda")


@each("wrong", ["tpu", "", "CPU", 1, None])
def test_an_unknown_device_is_refused(wrong):
    with pytest.raises(
        ParameterError, match="^device = .* is not allowed: give one of 'auto', 'cpu'"
    ):
        device.choose_device(wrong)


def test_mps_is_taken_where_torch_offers_it_and_said_to_be_untested(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.choose_device("mps").type == "mps"
    assert "untested" in capsys.readouterr().out


def test_the_report_names_torch_the_cpu_and_both_16_bit_formats():
    lines = [str(line) for line in device.report(torch.device("cpu"))]
    assert all(line.startswith(("[OK] ", "[--] ")) for line in lines)
    text = "\n".join(lines)
    for word in (torch.__version__, "CUDA GPU", "bfloat16", "float16", "float8", "cores"):
        assert word in text


def test_the_report_times_products_on_one_thread_and_gives_the_others_back(monkeypatch):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)

    def interrupted(*_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "matmul_seconds", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            device.report(torch.device("cpu"))
        assert [*seen, torch.get_num_threads()] == [1, 3]
    finally:
        torch.set_num_threads(before)


def test_the_same_seed_gives_the_same_numbers():
    device.set_seed(3)
    first = torch.randn(4)
    device.set_seed(3)
    assert torch.equal(first, torch.randn(4))
