"""The README's class on one server is what it says: this machine only, a password that is in no file, a copy for each.

The live test needs jupyterhub and configurable-http-proxy, which the course itself does without.
"""

import importlib.util
import os
import re
import shutil
import sys
import tempfile
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import classroom

from amp_utils.course import handout

ROOT = Path(__file__).parents[2]
PROXY = shutil.which("configurable-http-proxy") or os.environ.get("CONFIGURABLE_HTTP_PROXY")


class Settings(SimpleNamespace):
    """Stands for JupyterHub's configuration object: every section is there once it is named."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(self, name, Settings())
        return getattr(self, name)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASS_PASSWORD", "from outside")
    made = Settings()
    exec(
        compile(classroom.configuration(), "jupyterhub_config.py", "exec"),
        {"get_config": lambda: made},
    )
    return made


def test_the_class_is_on_this_machine_only_and_its_password_in_no_file(settings):
    assert settings.JupyterHub.bind_url.startswith("http://127.0.0.1:")
    assert settings.SharedPasswordAuthenticator.user_password == "from outside"
    assert len(settings.Authenticator.allowed_users) == 30 and not vars(settings.Authenticator).get(
        "allow_all"
    )
    assert (
        settings.Spawner.environment["OMP_NUM_THREADS"] == "1"
        and settings.Spawner.cmd[0] == sys.executable
    )


def test_kernels_meet_in_files_of_their_own_because_ports_collide(settings):
    assert "--KernelManager.transport=ipc" in settings.Spawner.args
    place = settings.Spawner.environment["JUPYTER_RUNTIME_DIR"]
    ada, emmy = (
        place(SimpleNamespace(user=SimpleNamespace(name=name))) for name in ("ada", "emmy")
    )
    assert ada != emmy and Path(ada).parent.is_dir() and len(ada) < len(tempfile.gettempdir()) + 20


def test_without_a_password_nothing_starts(settings, monkeypatch):
    monkeypatch.delenv("CLASS_PASSWORD")
    with pytest.raises(KeyError, match="CLASS_PASSWORD"):
        exec(classroom.configuration(), {"get_config": Settings})


def test_a_student_gets_a_copy_that_is_never_overwritten(settings, tmp_path, monkeypatch):
    given = tmp_path / "course" / "build" / "handout"
    shutil.copytree(ROOT / "notebooks", given / "students")
    shutil.copytree(ROOT / "imgs", given / "imgs")
    give = settings.Spawner.pre_spawn_hook
    monkeypatch.setitem(give.__globals__, "course", tmp_path / "course")
    ada, emmy = (SimpleNamespace(user=SimpleNamespace(name=name)) for name in ("ada", "emmy"))
    give(ada)
    mine = tmp_path / "homes" / "ada" / "notebooks" / Path(settings.Spawner.default_url).name
    assert mine.is_file() and (mine.parents[1] / "imgs" / "amp_step.svg").is_file()
    assert "notebooks/" + mine.name in settings.Spawner.default_url
    mine.write_text("my work")
    give(ada), give(emmy)
    assert mine.read_text() == "my work"
    assert (tmp_path / "homes" / "emmy" / "notebooks" / mine.name).stat().st_size > 1000


def test_the_readme_names_what_was_measured():
    section = (ROOT / "README.md").read_text("utf-8").split("## The classroom")[1].split("\n## ")[0]
    assert (
        re.search(r"10 students", section)
        and re.search(r"\d+ MB", section)
        and "tests/classroom.py" in section
    )


@pytest.mark.skipif(
    not importlib.util.find_spec("jupyterhub"), reason="jupyterhub is not installed"
)
@pytest.mark.skipif(not PROXY, reason="configurable-http-proxy is not installed")
@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(),
    reason="memory by process is read from Linux's /proc",
)
def test_two_students_run_a_lesson_at_once(tmp_path):
    assert handout.main(ROOT) == 0
    outcome = classroom.teach(2, "06_grad_scaler", PROXY, tmp_path)
    assert all(
        said and all(words.startswith("✎") for words in said) for said in outcome.said.values()
    )
    assert sorted(outcome.said) == ["student01", "student02"] and 50 < outcome.of_one < 2000
    with (
        classroom.hub(1, PROXY, tmp_path) as (address, _),
        pytest.raises(urllib.error.HTTPError, match="403"),
    ):
        classroom.Student(address, "student01").login("not the password")
