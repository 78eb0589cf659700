"""torch.compile without traces on the disk, and with a sentence where it cannot build."""

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch


def private_cache() -> tempfile.TemporaryDirectory:
    """A folder for all that the compiler of this process builds; it goes with the process.

    Call it before the first use of torch.compile: inductor reads the settings when it is imported.
    The returned folder's `cleanup` removes it earlier.
    """
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": folder.name,
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # they would be kept elsewhere
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no helper processes
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # trust the CPU's word on its vector units
    }
    return folder


def choose_backend(wanted: str, function: Callable, *inputs: Any) -> tuple[str, str]:
    """The backend for torch.compile here and a sentence about it; "auto" compiles `function`.

    "inductor" where machine code can be built, else "aot_eager", which does all but the last step.
    An error of `function` itself is raised.
    """
    if wanted != "auto":
        return wanted, f"{wanted}, as the parameter says: no machine code is built."
    # A build of torch for CUDA says on a machine without a driver that it found none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        torch.compile(function, backend="inductor")(*inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).split(":")[0]
        return "aot_eager", (
            f"torch.compile cannot build machine code here ({reason}): install a C++ compiler "
            "(Debian, Ubuntu: apt install g++ python3-dev; macOS: xcode-select --install; "
            "Windows: the Visual Studio build tools) and restart the kernel; "
            "until then this lesson goes on without it."
        )
    return "inductor", "inductor: machine code is built."
