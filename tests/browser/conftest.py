"""A real browser on a real Jupyter server, as fixtures.

    def test_something(lab):                       # JupyterLab 4; `notebook7` is the same on Notebook 7
        page = lab.open(["import flashviz as fv", "fv.play(run)"])      # or lab.open(Path("notebooks/03_….ipynb"))
        lab.run_all(page)                          # returns when every cell has finished; a cell that raises fails the test
        page.get_by_role("button", name="Next").click()                 # `page` is Playwright's own
        expect(page.locator(".flashviz")).to_contain_text("…")          # playwright.sync_api.expect waits by itself
        assert lab.console_errors == []
        assert lab.outside_requests == []

`both` runs a test on each of the two. `lab.open(..., color_scheme="dark", reduced_motion="reduce", viewport={...})` passes
its further arguments to Playwright's `browser.new_context`. `lab.value(page, "expression")` evaluates a Python expression
in the notebook's kernel and returns what it prints. Every test has a browser context of its own; its kernels are shut down when it ends.

Chromium is the system's (`chromium` on the path, or FLASHVIZ_CHROMIUM). Where it is missing the tests are skipped and the
last lines of the run say so; with CI=true or FLASHVIZ_REQUIRE_BROWSER=1 they fail.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import nbformat
import pytest

MISSING = "Chromium is missing; on Debian and Ubuntu: apt-get install chromium (or set FLASHVIZ_CHROMIUM to its path)"
START_SECONDS = 60
RUN_SECONDS = 120
# No extension manager, no news, no updates: nothing that would ask for another host. No autosave while a test looks, and
# every cell in the page at once.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
# What Notebook 7 throws at its own start, with an empty notebook and default settings: no fault of a chapter.
NOTEBOOK7_OWN = (
    "Cannot read properties of undefined (reading 'schema')",
    "Command 'filebrowser:open-path' not registered.",
)
# jupyter_server remembers where a static file lies by its name alone. Fonts have the same names in both front ends, so
# once JupyterLab has asked for one, the same server refuses it to Notebook 7 (403). A server for one of them does not.
SHARED_FONT = re.compile(r"/static/notebook/\w+\.woff2?$")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class Server:
    """One Jupyter server on a free loopback port; it serves JupyterLab under /lab and Notebook 7 under /notebooks."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.token = secrets.token_hex(16)
        settings = folder / "config" / "lab" / "user-settings" / "@jupyterlab"
        for name, values in SETTINGS.items():
            file = settings / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        own = {
            "IPYTHONDIR": "ipython",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "config/lab/user-settings",
            "JUPYTERLAB_WORKSPACES_DIR": "config/lab/workspaces",
        }
        environment = {**os.environ, **{name: str(folder / path) for name, path in own.items()}}
        environment.update(JUPYTER_PREFER_ENV_PATH="1", CUDA_VISIBLE_DEVICES="")
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    "--allow-root",
                    "--expose-app-in-browser",
                    "--ServerApp.ip=127.0.0.1",
                    "--ServerApp.port=0",
                    f"--ServerApp.root_dir={self.root}",
                    f"--IdentityProvider.token={self.token}",
                    "--LabApp.extension_manager=readonly",
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                    "--JupyterNotebookApp.expose_app_in_browser=True",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            self.url = self._wait_for_url(folder / "runtime")
        except BaseException:
            self.stop()
            raise

    def _wait_for_url(self, runtime: Path) -> str:
        file = runtime / f"jpserver-{self.process.pid}.json"
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
            else:
                raise RuntimeError(f"the Jupyter server ended at its start:\n{self.log.read_text()[-3000:]}")
            try:
                port = int(json.loads(file.read_text())["port"])
                url = f"http://127.0.0.1:{port}"
                with urllib.request.urlopen(f"{url}/api/status?token={self.token}", timeout=5):
                    return url
            except (OSError, ValueError, KeyError):
                continue
        raise RuntimeError(f"no Jupyter server after {START_SECONDS} s:\n{self.log.read_text()[-3000:]}")

    def request(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def stop_kernels(self) -> None:
        for session in self.request("/api/sessions"):
            self.request(f"/api/sessions/{session['id']}", "DELETE")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Jupyter:
    """What a test gets: notebooks opened in one front end (`kind` is "lab" or "notebook")."""

    def __init__(self, kind: str, server: Server, browser: Any) -> None:
        self.kind = kind
        self.server = server
        self.browser = browser
        self.contexts: list[Any] = []
        #: what pages wrote to the console as an error, and uncaught exceptions
        self.console_errors: list[str] = []
        #: addresses outside this machine that a page asked for (each was refused)
        self.outside_requests: list[str] = []

    def open(self, source: Path | Sequence[str], **context: Any) -> Any:
        """Open a copy of a notebook, or a new one of these code cells, and wait until its kernel is ready."""
        name = f"{secrets.token_hex(4)}-{source.name}" if isinstance(source, Path) else f"{secrets.token_hex(4)}.ipynb"
        file = self.server.root / name
        if isinstance(source, Path):
            shutil.copy(source, file)
        else:
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in source])
            notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(notebook, file)
        opened = self.browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **context})
        self.contexts.append(opened)
        opened.set_default_timeout(30_000)
        opened.route("**/*", self._loopback_only)
        page = opened.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", self._on_exception)
        path = f"lab/tree/{quote(name)}?reset&" if self.kind == "lab" else f"notebooks/{quote(name)}?"
        page.goto(f"{self.server.url}/{path}token={self.server.token}")
        self._finish(
            page,
            """async () => {
                const panel = window.jupyterapp.shell.currentWidget;
                await panel.context.ready;
                await panel.sessionContext.ready;
                await panel.sessionContext.session.kernel.info;
            }""",
        )
        return page

    def run_all(self, page: Any, allow_errors: bool = False) -> None:
        """Run every cell and return when the last has finished; a cell that raised is an AssertionError that names it."""
        self._finish(page, "async () => { await window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
        cells = self.cells(page)
        errors = [
            f"cell {index}: {output['ename']}: {output['evalue']}"
            for index, cell in enumerate(cells)
            for output in cell.get("outputs", [])
            if output["output_type"] == "error"
        ]
        assert allow_errors or not errors, "; ".join(errors)

    def cells(self, page: Any) -> list[dict[str, Any]]:
        """The cells as the page holds them now, outputs included (nbformat's JSON)."""
        return list(page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"))

    def value(self, page: Any, expression: str) -> str:
        """What `print(expression)` prints in the page's kernel, e.g. lab.value(page, "slider.value")."""
        answer = page.evaluate(
            """async code => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const future = kernel.requestExecute({code, store_history: false, silent: false});
                let text = '';
                future.onIOPub = message => {
                    const content = message.content;
                    if (message.header.msg_type === 'stream') text += content.text;
                    if (message.header.msg_type === 'error') text += content.ename + ': ' + content.evalue;
                };
                await future.done;
                return text;
            }""",
            f"print({expression})",
        )
        return str(answer).rstrip("\n")

    def save(self, page: Any) -> Path:
        """Save the notebook as the reader would, and return its file."""
        self._finish(page, "async () => { await window.jupyterapp.shell.currentWidget.context.save(); }")
        name = page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        return self.server.root / str(name)

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        self.contexts.clear()
        self.server.stop_kernels()

    def _finish(self, page: Any, script: str) -> None:
        """Run an asynchronous function in the page and wait for its end, with a limit."""
        page.wait_for_function(
            "() => window.jupyterapp?.shell?.currentWidget?.sessionContext", timeout=START_SECONDS * 1000
        )
        page.evaluate(
            f"""() => {{
                window.flashvizDone = '';
                ({script})().then(() => window.flashvizDone = 'ok', error => window.flashvizDone = 'failed: ' + error);
            }}"""
        )
        page.wait_for_function("() => window.flashvizDone !== ''", timeout=RUN_SECONDS * 1000)
        done = page.evaluate("() => window.flashvizDone")
        assert done == "ok", done

    def _on_console(self, message: Any) -> None:
        url = message.location.get("url", "")
        if message.type == "error" and not (self.kind == "notebook" and SHARED_FONT.search(url)):
            self.console_errors.append(f"{message.text} ({url})")

    def _on_exception(self, error: Any) -> None:
        if self.kind == "lab" or str(error) not in NOTEBOOK7_OWN:
            self.console_errors.append(str(error))

    def _loopback_only(self, route: Any) -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("http", "https", "ws", "wss") and address.hostname != "127.0.0.1":
            self.outside_requests.append(route.request.url)
            route.abort()
        else:
            route.continue_()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's Chromium; without one the test is skipped, or fails where browsers are required."""
    path = os.environ.get("FLASHVIZ_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        required = os.environ.get("CI") == "true" or os.environ.get("FLASHVIZ_REQUIRE_BROWSER") == "1"
        (pytest.fail if required else pytest.skip)(MISSING)
    return path


@pytest.fixture(scope="session")
def jupyter_server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("jupyter"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Playwright's browser. Per module: while it runs, its event loop occupies the thread that other tests need."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def lab(jupyter_server: Server, browser: Any) -> Iterator[Jupyter]:
    """JupyterLab 4; see the top of this file."""
    jupyter = Jupyter("lab", jupyter_server, browser)
    yield jupyter
    jupyter.close()


@pytest.fixture
def notebook7(jupyter_server: Server, browser: Any) -> Iterator[Jupyter]:
    """Notebook 7, with the methods of `lab`."""
    jupyter = Jupyter("notebook", jupyter_server, browser)
    yield jupyter
    jupyter.close()


@pytest.fixture(params=["lab", "notebook"])
def both(request: pytest.FixtureRequest, jupyter_server: Server, browser: Any) -> Iterator[Jupyter]:
    """The test runs twice: on JupyterLab 4 and on Notebook 7."""
    jupyter = Jupyter(request.param, jupyter_server, browser)
    yield jupyter
    jupyter.close()
