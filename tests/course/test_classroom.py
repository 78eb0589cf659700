"""The class on one server: on this machine only, the password in no file, a copy for each student.

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
from unittest.mock import Mock

import pytest
from support import classroom

from amp_utils.course import handout

ROOT = Path(__file__).parents[2]
PROXY = shutil.which("configurable-http-proxy") or os.environ.get("CONFIGURABLE_HTTP_PROXY")
LACKING = [
    name
    for name, there in {
        "jupyterhub": importlib.util.find_spec("jupyterhub"),
        "configurable-http-proxy": PROXY,
        "Linux's /proc, which tells the memory of a process": Path("/proc/self/smaps").exists(),
    }.items()
    if not there
]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASS_PASSWORD", "from outside")
    made = Mock()
    exec(classroom.CONFIGURATION.read_text("utf-8"), {"get_config": lambda: made})
    return made


def users(*names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(user=SimpleNamespace(name=name)) for name in names]


def test_the_class_is_on_this_machine_only_and_its_password_in_no_file(settings):
    assert settings.JupyterHub.bind_url.startswith("http://127.0.0.1:")
    assert settings.SharedPasswordAuthenticator.user_password == "from outside"
    assert len(settings.Authenticator.allowed_users) == 30
    assert "allow_all" not in vars(settings.Authenticator)
    assert settings.Spawner.environment["OMP_NUM_THREADS"] == "1"
    assert settings.Spawner.cmd[0] == sys.executable


def test_kernels_meet_in_files_of_their_own_because_ports_collide(settings):
    assert "--KernelManager.transport=ipc" in settings.Spawner.args
    place = settings.Spawner.environment["JUPYTER_RUNTIME_DIR"]
    ada, emmy = map(place, users("ada", "emmy"))
    assert ada != emmy and Path(ada).parent.is_dir() and len(ada) < len(tempfile.gettempdir()) + 20


def test_without_a_password_nothing_starts(monkeypatch):
    monkeypatch.delenv("CLASS_PASSWORD", raising=False)
    with pytest.raises(KeyError, match="CLASS_PASSWORD"):
        exec(classroom.CONFIGURATION.read_text("utf-8"), {"get_config": Mock})


def test_a_student_gets_a_copy_that_is_never_overwritten(settings, tmp_path, monkeypatch):
    given = tmp_path / "course" / "build" / "handout"
    shutil.copytree(ROOT / "notebooks", given / "students")
    shutil.copytree(ROOT / "imgs", given / "imgs")
    give = settings.Spawner.pre_spawn_hook
    monkeypatch.setitem(give.__globals__, "course", tmp_path / "course")
    ada, emmy = users("ada", "emmy")
    give(ada)
    mine = tmp_path / "homes" / "ada" / "notebooks" / Path(settings.Spawner.default_url).name
    assert mine.is_file() and (mine.parents[1] / "imgs" / "amp_step.svg").is_file()
    assert "notebooks/" + mine.name in settings.Spawner.default_url
    mine.write_text("my work")
    give(ada), give(emmy)
    assert mine.read_text() == "my work"
    assert (tmp_path / "homes" / "emmy" / "notebooks" / mine.name).stat().st_size > 1000


def test_teaching_names_the_configuration_and_what_was_measured():
    section = (ROOT / "TEACHING.md").read_text("utf-8").split("\n## The classroom\n")[1]
    for place in (classroom.CONFIGURATION, classroom.__file__):
        assert str(Path(place).relative_to(ROOT)) in section
    assert re.search(r"10 students", section) and re.search(r"\d+ MB", section)


@pytest.mark.full
@pytest.mark.skipif(bool(LACKING), reason=f"not on this machine: {', '.join(LACKING)}")
def test_two_students_run_a_lesson_at_once(tmp_path):
    handout.build(ROOT / "notebooks", ROOT / "build" / "handout")
    outcome = classroom.teach(2, "06_grad_scaler", PROXY, tmp_path)
    for said in outcome.said.values():
        assert said and all(words.startswith("✎") for words in said)
    assert sorted(outcome.said) == ["student01", "student02"] and 50 < outcome.of_one < 2000
    with (
        classroom.hub(1, PROXY, tmp_path) as address,
        pytest.raises(urllib.error.HTTPError, match="403"),
    ):
        classroom.Student(address, "student01").login("not the password")
