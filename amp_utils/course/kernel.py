"""Kernels that are reached through files: a free port may be taken before they listen there."""

import tempfile
from pathlib import Path
from uuid import uuid4

from jupyter_client import AsyncKernelManager, KernelManager


class Private:
    """Sockets are files beside the connection file, with a short path: systems allow 104 bytes."""

    def __init__(self, **traits) -> None:
        file = Path(tempfile.gettempdir(), f"kernel-{uuid4().hex[:16]}.json")
        super().__init__(transport="ipc", connection_file=str(file), **traits)


class Manager(Private, KernelManager):
    """For nbval."""


class AsyncManager(Private, AsyncKernelManager):
    """For nbclient, and papermill with it."""


OPTIONS = {
    "kernel_manager_class": AsyncManager,
    "extra_arguments": ["--IPKernelApp.log_level=50"],  # no traceback after Ctrl-C
}
