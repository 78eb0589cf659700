"""torch's own DataParallel threads, on any device."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import parallel_apply


def in_data_parallel(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list:
    """What `function(x)` returns in two threads that torch.nn.parallel.parallel_apply starts.

    parallel_apply asks for an accelerator, and for CUDA's autocast switch. Without CUDA, the
    device of `x` and its switch stand in.
    """
    is_on = torch.is_autocast_enabled
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda: x.device,
        "current_stream": lambda index: nullcontext(),
        "device_index": lambda index: nullcontext(),
    }
    with ExitStack() as patches:
        if not x.is_cuda:
            patches.enter_context(patch.multiple(torch.accelerator, **accelerator))
            ask = patch("torch.is_autocast_enabled", lambda kind=x.device.type: is_on(kind))
            patches.enter_context(ask)
        return parallel_apply([function] * 2, [x] * 2, devices=[0, 0])
