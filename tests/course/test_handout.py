"""A handout is whole: it loads nothing from outside, every link in it leads somewhere, and no solution slips out."""

import ast
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from amp_utils.course import handout, notebook, pages

ROOT = Path(__file__).parents[2]
LESSONS = notebook.lessons(ROOT / "notebooks")
SEEN: dict[tuple, list[str]] = {}
VOID = {"link", "meta", "img", "br", "hr", "input", "col", "source", "mspace"}


class Page(HTMLParser):
    """What a page loads, where it links to, and which places in it can be linked to."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads, self.links, self.places, self.text, self.open = [], [], [], "", []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.open += [] if tag in VOID else [tag]
        self.places += [attributes["id"]] if "id" in attributes else []
        if tag == "a":
            self.links += [attributes["href"]] if "href" in attributes else []
        else:
            self.loads += [
                attributes[name]
                for name in ("src", "href", "data", "poster")
                if attributes.get(name)
            ]
            self.loads += re.findall(r"\S+(?=\s+\d+[wx])", attributes.get("srcset") or "")
        self.loads += re.findall(r"url\(\s*['\"]?([^'\")]+)", attributes.get("style") or "")

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open[-1:] == ["style"]:
            self.loads += re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", data)
        elif self.open[-1:] == ["script"]:
            self.loads += re.findall(r"https?://[^'\"\s]+\.(?:js|css)|import\(['\"]([^'\"]+)", data)
        elif not {"pre", "code", "math"} & set(self.open):
            self.text += data


def complaints(folder: Path) -> list[str]:
    """What is wrong with the pages and notebooks in a folder, each in a sentence."""
    found = []
    for path in sorted(folder.rglob("*.html")):
        page = Page(path)
        found += [
            f"{path.name} loads {load}." for load in page.loads if not str(load).startswith("data:")
        ]
        found += [
            f"{path.name} links to {link}."
            for link in page.links
            if not leads_somewhere(path, link)
        ]
        found += [
            f"{path.name} shows the formula {raw} as text."
            for raw in re.findall(r"\$[^$\s][^$\n]*\$", page.text)
        ]
    for path in sorted(folder.rglob("*.ipynb")):
        for link in markdown_links(path):
            found += (
                []
                if leads_somewhere(path, link)
                else [f"{path.parent.name}/{path.name} links to {link}."]
            )
    return found


def markdown_links(path: Path) -> list[str]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))


def leads_somewhere(path: Path, link: str) -> bool:
    url = urlsplit(link)
    if url.scheme:
        return url.scheme == "https"
    target = path.parent / unquote(url.path) if url.path else path
    if not target.is_file() or not url.fragment:
        return target.is_file()
    if target.suffix == ".html":
        return {url.fragment, unquote(url.fragment)} & set(places(target))
    headings = re.findall(r"^#+ (.+)$", "".join(markdown(target)), re.M)
    return unquote(url.fragment) in [heading.replace(" ", "-") for heading in headings]


def places(path: Path) -> list[str]:
    key = (path.resolve(), path.stat().st_mtime_ns)
    if key not in SEEN:
        SEEN[key] = Page(path).places
    return SEEN[key]


def markdown(path: Path) -> list[str]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown"]


@pytest.fixture(scope="session")
def built(tmp_path_factory, request):
    """The handout of the course, built once for all workers that run tests side by side."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder
    with (folder / "handout.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "handout").exists():
            assert handout.build(ROOT / "notebooks", folder / "handout") == len(LESSONS)
    return folder / "handout"


@pytest.fixture(scope="module")
def one_lesson(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("one_lesson")
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(ROOT / "imgs", tmp_path / "imgs")
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", tmp_path / "notebooks")
    edit(tmp_path, lambda source: re.sub(r"\]\(\w+\.ipynb(#[\w-]+)?\)", "](#Recap)", source))
    handout.build(tmp_path / "notebooks", tmp_path / "build" / "handout")
    return tmp_path


@pytest.fixture
def small(one_lesson, tmp_path):
    """A course of one lesson and a handout of it."""
    return shutil.copytree(one_lesson, tmp_path / "course")


def edit(folder, change):
    """Change the text of the small course's one lesson."""
    path = folder / "notebooks" / "00_start_here.ipynb"
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell.source = change(cell.source) if cell.cell_type == "markdown" else cell.source
    nbformat.write(notebook, path)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# --- the handout of the course


def test_nothing_is_loaded_and_every_link_leads_somewhere(built):
    assert complaints(built) == []


def test_every_lesson_is_there_three_times_and_in_the_index(built):
    links = Page(built / "index.html").links
    for lesson in LESSONS:
        for name in (
            f"students/{lesson.name}",
            f"solutions/{lesson.name}",
            f"pages/{lesson.stem}.html",
        ):
            assert (built / name).is_file() and name in links


def test_pages_have_no_script_and_hold_their_pictures_and_formulas(built):
    for lesson in LESSONS:
        text = (built / "pages" / f"{lesson.stem}.html").read_text("utf-8")
        cells = nbformat.read(lesson, 4).cells
        assert "<script" not in text
        drawn = sum(
            "image/png" in output.get("data", {})
            for cell in cells
            for output in cell.get("outputs", [])
        )
        shown = sum(
            cell.source.count("](../imgs/") for cell in cells if cell.cell_type == "markdown"
        )
        assert text.count("<img") == text.count('src="data:image/') == drawn + shown
        formulas = re.findall(
            r"\$\$.+?\$\$|\$[^$\n]+\$", re.sub(r"`[^`\n]*`", "", "\n".join(markdown(lesson))), re.S
        )
        assert text.count("<math") == len(formulas)


def test_students_get_stubs_and_checks_and_no_solution_and_no_output(built):
    for lesson in LESSONS:
        given = nbformat.read(built / "students" / lesson.name, 4)
        whole = nbformat.read(lesson, 4)
        nbformat.validate(given)
        tags = [tag for cell in given.cells for tag in cell.metadata.get("tags", [])]
        assert (
            tags.count("exercise") == tags.count("check") == tags.count("hint") > 0
            and "solution" not in tags
        )
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in given.cells)
        sources = [
            cell.source for cell in whole.cells if "solution" not in cell.metadata.get("tags", [])
        ]
        assert [cell.source for cell in given.cells] == sources
        assert (built / "solutions" / lesson.name).read_text("utf-8") == lesson.read_text("utf-8")


def test_students_need_nothing_that_only_a_solution_brings(built):
    for lesson in LESSONS:
        cells = nbformat.read(lesson, 4).cells
        mine, others = set(), set()
        for cell in cells:
            if cell.cell_type == "code":
                (mine if "solution" in cell.metadata.get("tags", []) else others).update(
                    names_bound(cell.source)
                )
        wanted = mine - others
        for cell in nbformat.read(built / "students" / lesson.name, 4).cells:
            if cell.cell_type == "code":
                loaded = {
                    node.id
                    for node in ast.walk(ast.parse(cell.source))
                    if isinstance(node, ast.Name)
                }
                assert not loaded & wanted, (
                    f"{lesson.name} uses {loaded & wanted}, which only a solution defines"
                )


def names_bound(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


# --- the check itself: what is broken is found


def test_an_unbroken_handout_has_no_complaints(small):
    assert complaints(small / "build" / "handout") == []


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<script>import("https://cdn.example/x.mjs")</script>', "loads https://cdn.example/x.mjs"),
        ('<link rel="stylesheet" href="style.css">', "loads style.css"),
        ('<img src="../imgs/amp_step.svg">', "loads ../imgs/amp_step.svg"),
        ('<img srcset="a.png 2x">', "loads a.png"),
        ("<style>@font-face { src: url(font.woff2) }</style>", "loads"),
        ('<p style="background: url(back.png)">', "loads back.png"),
        ('<a href="14_debugging_clinic.html">next</a>', "links to 14_debugging_clinic.html"),
        ('<a href="#nowhere">there</a>', "links to #nowhere"),
        ('<a href="../index.html#nowhere">there</a>', "links to ../index.html#nowhere"),
        ('<a href="http://example.org">there</a>', "links to http://example.org"),
        ("<p>The floor is $2^{-24}$.</p>", "shows the formula $2^{-24}$ as text"),
    ],
)
def test_a_broken_page_is_found(small, broken, complaint):
    page = small / "build" / "handout" / "pages" / "00_start_here.html"
    page.write_text(page.read_text("utf-8").replace("</body>", broken + "</body>"), "utf-8")
    (found,) = complaints(small / "build" / "handout")
    assert complaint in found


@pytest.mark.parametrize(
    "link", ["05_gradient_underflow.ipynb", "#Nowhere", "00_start_here.ipynb#Nowhere"]
)
def test_a_broken_link_in_a_notebook_is_found(small, link):
    path = small / "build" / "handout" / "students" / "00_start_here.ipynb"
    path.write_text(path.read_text("utf-8").replace("](#Recap)", f"]({link})", 1), "utf-8")
    assert f"students/00_start_here.ipynb links to {link}." in complaints(
        small / "build" / "handout"
    )


# --- building


def test_two_builds_are_equal_and_the_second_takes_the_place_of_the_first(small):
    out = small / "build" / "handout"
    before = contents(out)
    (out / "pages" / "gone.html").touch()
    handout.build(small / "notebooks", out)
    assert contents(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["handout"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            r"$\nosuchcommand{x}$",
            r"00_start_here.ipynb cannot be handed out: The formula $\nosuchcommand{x}$ cannot",
        ),
        (
            "![a picture](../imgs/gone.svg)",
            "The picture gone.svg is not a file that can be put into the page.",
        ),
        (
            "[next](99_gone.ipynb)",
            "00_start_here.ipynb links to 99_gone.ipynb, which is not there.",
        ),
        (
            "[notes](../../notes.txt)",
            "links to ../../notes.txt, which lies outside of what is handed out.",
        ),
    ],
)
def test_what_cannot_be_handed_out_is_a_sentence_and_leaves_the_old_handout(
    small, text, sentence, capsys
):
    (small.parent / "notes.txt").touch()
    before = contents(small / "build")
    edit(small, lambda source: source.replace("## Recap", f"{text}\n\n## Recap"))
    assert handout.main(small) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert contents(small / "build") == before


def test_a_page_without_a_card_and_a_file_that_is_no_notebook_are_sentences(small, capsys):
    path = small / "notebooks" / "00_start_here.ipynb"
    edit(small, lambda source: source.replace("**Minutes**", "**Hours**"))
    assert handout.main(small) == 1
    path.write_text("{", "utf-8")
    assert handout.main(small) == 1
    path.unlink()
    assert handout.main(small) == 1
    no_row, no_notebook, no_lesson = capsys.readouterr().err.splitlines()
    assert "the card has no row **Minutes**" in no_row and "cannot be handed out" in no_notebook
    assert no_lesson.startswith("There are no lessons in ")


def test_a_linked_file_is_taken_along(small):
    (small / "notebooks" / "ledger.md").write_text("# Ledger", "utf-8")
    edit(small, lambda source: source.replace("## Recap", "[ledger](ledger.md#Ledger)\n\n## Recap"))
    assert handout.main(small) == 0
    for folder in ("students", "solutions", "pages"):
        assert (small / "build" / "handout" / folder / "ledger.md").read_text("utf-8") == "# Ledger"


def test_an_argument_is_refused_in_a_sentence():
    command = [sys.executable, "-m", "amp_utils.course", "handout", "--out", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 1
        and done.stderr == "--out x is not allowed: this command takes nothing.\n"
    )


def test_a_formula_keeps_its_characters():
    assert "<mi>λ</mi>" in pages.mathml(r"\lambda") and "max_norm" in pages.mathml(
        r"\text{max\_norm}"
    )
    assert 'display="block"' in pages.mathml("x", display=True)
