"""Kernels that are reached through files: a free port may be taken before they listen there."""

import tempfile
from pathlib import Path
from uuid import uuid4

from jupyter_client import AsyncKernelManager, KernelManager
from traitlets import HasTraits, default


class Private(HasTraits):
    """Sockets are files beside the connection file, with a short path: systems allow 104 bytes."""

    @default("transport")
    def _files_for_sockets(self) -> str:
        return "ipc"

    @default("connection_file")
    def _own_name(self) -> str:
        return str(Path(tempfile.gettempdir(), f"kernel-{uuid4().hex[:16]}.json"))


class Manager(Private, KernelManager):
    """For nbval."""


class AsyncManager(Private, AsyncKernelManager):
    """For nbclient, and papermill with it."""
