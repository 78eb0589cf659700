"""JupyterHub for a class that you trust, on one machine; see "The classroom" in TEACHING.md.

Start the hub in an empty folder, which will hold the students' work. To change a setting, copy this
file there.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import amp_utils

course = Path(amp_utils.__file__).parents[1]
homes = Path.cwd() / "homes"
sockets = tempfile.TemporaryDirectory()  # a short path: those of sockets end after 107 characters

c = get_config()  # noqa: F821
# This machine only: put a web server with HTTPS in front of it.
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = os.environ["CLASS_PASSWORD"]
c.Authenticator.allowed_users = {f"student{n:02}" for n in range(1, 31)}

# Every server runs under the account that started the hub.
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(homes / "{username}")
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.environment = {
    "OMP_NUM_THREADS": "1",  # more threads than cores would spin against each other
    "JUPYTER_RUNTIME_DIR": lambda spawner: f"{sockets.name}/{spawner.user.name}",
}
c.Spawner.start_timeout = c.Spawner.http_timeout = 300  # seconds, for when all start at once
c.Spawner.args = [
    # Kernels that start together can pick the same TCP port, and then one of them never answers.
    "--KernelManager.transport=ipc",
    "--MappingKernelManager.kernel_info_timeout=300",
    "--MappingKernelManager.cull_idle_timeout=3600",
    "--MappingKernelManager.cull_connected=True",
]


def give_notebooks(spawner):
    """A student's own copy, made at the first start and never overwritten."""
    for source, name in {"students": "notebooks", "imgs": "imgs"}.items():
        if not (homes / spawner.user.name / name).exists():
            shutil.copytree(course / "build" / "handout" / source, homes / spawner.user.name / name)


c.Spawner.pre_spawn_hook = give_notebooks
