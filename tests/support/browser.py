"""Chromium for tests: the system's own, through Playwright, and nothing leaves the machine."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import LIMIT, answers, free_ports, wait_for

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """One browser for all tests of a session; without one they are skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make ready")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    arguments = ["--disable-dev-shm-usage"]  # a container's /dev/shm may be small
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses its sandbox to root
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
        except sync_api.Error as error:
            pytest.skip(f"needs a browser that starts: {str(error).splitlines()[0]}")
        yield browser


class Lab(NamedTuple):
    """A running JupyterLab, and the environment in which `jupyter` has its settings."""

    address: str
    folder: Path
    environment: dict[str, str]


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[Lab]:
    """JupyterLab with `folder` for its files and its settings, in scripts as `jupyterapp`."""
    port = free_ports(1)[0]
    address = f"http://127.0.0.1:{port}"
    environment = dict(os.environ)
    environment |= {
        f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    environment["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "WORKSPACES")
    options = {
        "ServerApp.root_dir": folder,
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.ip": "127.0.0.1",
        "IdentityProvider.token": "",
        "LabApp.expose_app_in_browser": True,
        "LabApp.extension_manager": "readonly",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    try:
        wait_for(lambda: answers(address))
        yield Lab(address, folder, environment)
    finally:
        server.terminate()
        server.wait(LIMIT)


@pytest.fixture
def opened(browser) -> Iterator[Callable]:
    """`opened(html, **options)`: a page with this HTML in a window of its own.

    With `address` it is that page, which may ask its own server for more. `options` are
    Playwright's for a context: viewport, color_scheme, java_script_enabled … A request to anywhere
    fails the test in the end, and so does an error in a script, if it is not JupyterLab's own, as a
    busy machine sees at times ("removeChild … not a child of this node").
    """
    contexts, wrong = [], []

    def refuse(route) -> None:
        wrong.append(f"it asks for {route.request.url}")
        route.abort()

    def notice(error) -> None:
        places = re.findall(r"https?://\S+", error.stack or "")
        if not places or not all("/static/lab/" in place for place in places):
            wrong.append(f"a script failed: {error.stack or error}")

    def open_page(html: str = "", address: str = "", **options):
        contexts.append(browser.new_context(**options))
        contexts[-1].route("**/*", refuse)
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT * 1000)
        page.on("pageerror", notice)
        if address:
            page.route("/".join(address.split("/")[:3]) + "/**", lambda route: route.continue_())
            page.goto(address)
        else:
            page.set_content(f"<!DOCTYPE html><html lang=en><body>{html}</body></html>")
        if options.get("java_script_enabled", True):
            two_frames(page)  # a figure draws itself once the first frame has its width
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, "; ".join(wrong)


@pytest.fixture
def visit(opened) -> Callable:
    """`visit(path, **options)`: a file, which may ask for other files; otherwise as `opened`."""
    return lambda path, **options: opened(address=path.as_uri(), **options)


def two_frames(page) -> None:
    """Wait until the page has been drawn twice."""
    frame = "requestAnimationFrame"
    page.evaluate(f"new Promise(done => {frame}(() => {frame}(done)))")


def violations(page, part: str | None = None, dark: bool = True) -> str:
    """What axe finds on a page, or in a part of it, against WCAG 2.2 AA: a line each, or "".

    In the `dark` it looks at contrast only: nothing else depends on colours.
    """
    from axe_playwright_python.sync_playwright import Axe

    options = {
        "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
        "rules": {"label-content-name-mismatch": {"enabled": True}},  # an experiment until 4.13
    }
    found = ""
    for scheme, asked in [("dark", {"runOnly": ["color-contrast"]})] * dark + [("light", options)]:
        page.emulate_media(color_scheme=scheme)
        two_frames(page)  # the page has heard
        found += Axe().run(page, context=part, options=asked).generate_snapshot()
    return found
