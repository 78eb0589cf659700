"""A handout is whole: nothing is loaded, every link leads somewhere, and no solution slips out."""

import ast
import hashlib
import json
import re
import shutil
import unicodedata
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from filelock import FileLock
from support.browser import violations

from amp_utils.course import CourseError, claims, handout, notebook, pages
from amp_utils.course.__main__ import main

ROOT = Path(__file__).parents[2]
LESSONS = notebook.lessons(ROOT / "notebooks")
TWO = [path for path in LESSONS if path.stem in ("00_start_here", "06_grad_scaler")]


# --- what is wrong with a folder of pages and notebooks


def complaints(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.html")):
        page = BeautifulSoup(path.read_text("utf-8"), "html.parser")
        loaded = [url for url in loads(page) if not url.startswith("data:")]
        loaded = [url for url in loaded if not is_search(path, url)]
        links = [tag["href"] for tag in page("a", href=True)]
        found += [f"{path.name} loads {url}" for url in loaded]
        found += [f"{path.name} links to {url}" for url in links if not leads_somewhere(path, url)]
        for tag in page(["pre", "code", "math", "style", "script"]):
            tag.decompose()
        formulas = re.findall(r"\$[^$\s][^$\n]*\$", page.get_text())
        found += [f"{path.name} shows {formula}" for formula in formulas]
    for path in sorted(folder.rglob("*.ipynb")):
        links = re.findall(r"\]\(([^)\s]+)\)", markdown(path))
        name = f"{path.parent.name}/{path.name}"
        found += [f"{name} links to {url}" for url in links if not leads_somewhere(path, url)]
    return found


def is_search(page: Path, url: str) -> bool:
    """Whether this is the one file that pages load, with no address of the web in its code."""
    script = page.parent / url
    if script.name != "book.js" or not script.is_file():
        return False
    first, code = script.read_text("utf-8").split("\n", 1)
    return first.startswith("const places = [") and not re.search("https?:|import|fetch", code)


def loads(page):
    """Every address from which a page would load something."""
    in_css = r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)"
    in_script = r"(https?://[^'\"\s]+\.(?:js|css))|import\(['\"]([^'\"]+)"
    texts = [(in_css, tag["style"]) for tag in page(style=True)]
    texts += [(in_css, tag.get_text()) for tag in page("style")]
    texts += [(in_script, tag.get_text()) for tag in page("script")]
    for tag in page(lambda tag: tag.name != "a"):
        yield from (tag[name] for name in ("src", "href", "data", "poster") if tag.get(name))
        yield from re.findall(r"\S+(?=\s+\d+[wx])", tag.get("srcset", ""))
    for pattern, text in texts:
        yield from map("".join, re.findall(pattern, text))


def leads_somewhere(path: Path, link: str) -> bool:
    url = urlsplit(link)
    if url.scheme:
        return url.scheme == "https"
    target = path.parent / unquote(url.path) if url.path else path
    if not target.is_file() or not url.fragment:
        return target.is_file()
    return bool({url.fragment, unquote(url.fragment)} & places(target, target.stat().st_mtime_ns))


@cache
def places(path: Path, changed: int) -> set[str]:
    """What can follow the # in a link to this file."""
    if path.suffix == ".html":
        page = BeautifulSoup(path.read_text("utf-8"), "html.parser")
        return {tag["id"] for tag in page(id=True)}
    text = markdown(path) if path.suffix == ".ipynb" else path.read_text("utf-8").lower()
    return {name.replace(" ", "-") for name in re.findall(r"^#+ (.+)$", text, re.M)}


def markdown(path: Path) -> str:
    """A notebook's text without what it quotes as code."""
    cells = nbformat.read(path, 4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"`[^`\n]*`", "", text)


def has(cell, tag):
    return tag in notebook.tags(cell)


# --- handouts


def copy_course(folder: Path, lessons: list[Path]) -> Path:
    """A course of these lessons; links to others lead to the recap of the same lesson."""
    (folder / "notebooks").mkdir(parents=True)
    shutil.copytree(ROOT / "imgs", folder / "imgs")
    names = "|".join(path.stem for path in lessons)
    for path in lessons:
        lesson = nbformat.read(path, 4)
        for cell in lesson.cells:
            cell.source = re.sub(
                rf"\]\((?!{names})\w+\.(ipynb|md)(#[\w-]+)?\)", "](#Recap)", cell.source
            )
        nbformat.write(lesson, folder / "notebooks" / path.name)
    return folder


@pytest.fixture(
    scope="module", params=["two lessons", pytest.param("the course", marks=pytest.mark.full)]
)
def course(request, tmp_path_factory):
    """The notebooks and their handout, built once for all workers that run tests side by side."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base
    if request.param == "the course":
        notebooks, out = ROOT / "notebooks", base / "handout"
        with FileLock(base / "handout.lock"):
            if not out.exists():
                assert handout.build(notebooks, out) == len(LESSONS)
    else:
        notebooks = copy_course(tmp_path_factory.mktemp("two"), TWO) / "notebooks"
        out = notebooks.parent / "build" / "handout"
        assert handout.build(notebooks, out) == 2
    return notebooks, out


@pytest.fixture
def built(course):
    return course[1]


@pytest.fixture
def lessons(course):
    return notebook.lessons(course[0])


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A course of one lesson; the current folder is another one."""
    monkeypatch.chdir(tmp_path)
    return copy_course(tmp_path / "course", TWO[:1])


def edit(folder, old, new):
    """Change the text of the small course's one lesson."""
    path = folder / "notebooks" / TWO[0].name
    lesson = nbformat.read(path, 4)
    assert any(old in cell.source for cell in lesson.cells)
    for cell in lesson.cells:
        cell.source = cell.source.replace(old, new)
    nbformat.write(lesson, path)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_nothing_is_loaded_and_every_link_leads_somewhere(built):
    assert complaints(built) == []


def read(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text("utf-8"), "html.parser")


def test_every_lesson_is_there_three_times_and_in_the_index(built, lessons):
    links = {tag["href"] for tag in read(built / "index.html").main("a")}
    expected = {f"pages/{path.stem}.html" for path in lessons}
    expected |= {f"{kind}/{path.name}" for path in lessons for kind in ("students", "solutions")}
    assert links == expected and all((built / name).is_file() for name in expected)


def test_every_page_has_the_contents_with_its_own_headings(built, lessons):
    for path in lessons:
        page = read(built / "pages" / f"{path.stem}.html")
        links = [tag["href"] for tag in page.nav("a")]
        assert {f"{other.stem}.html" for other in lessons} <= set(links)
        (current,) = page.nav("a", {"aria-current": "page"})
        assert current["href"] == f"{path.stem}.html"
        own = [tag["href"].removeprefix("#") for tag in current.parent.ul("a")]
        assert own == [tag["id"] for tag in page.main("h2")] != []
        ids = [tag["id"] for tag in page(id=True)]
        assert len(ids) == len(set(ids)), path.name


def test_a_lesson_names_its_claims_below_its_last_cell(built, lessons):
    notebooks = lessons[0].parent
    known = claims.read(notebooks).claims if (notebooks / "claims.toml").exists() else []
    for path in lessons:
        *_, last = read(built / "pages" / f"{path.stem}.html").main("div", class_="cell")
        after = [tag["id"] for fold in last.find_all_next(class_="claims") for tag in fold("li")]
        assert after == [claim.id for claim in known if claim.lesson == path.stem]


def test_the_search_knows_every_heading_and_no_answer(built, lessons):
    text = (built / "pages" / "book.js").read_text("utf-8").split("\n", 1)[0]
    places = json.loads(text.removeprefix("const places = ").removesuffix(";"))
    for path in lessons:
        page = read(built / "pages" / f"{path.stem}.html")
        ours = [place for place in places if place["page"] == f"{path.stem}.html"]
        folded = {tag["id"] for fold in page("details") for tag in fold(["h1", "h2", "h3"])}
        shown = [tag["id"] for tag in page.main(["h1", "h2", "h3"]) if tag["id"] not in folded]
        assert [place["id"] for place in ours] == shown, path.name
        said = " ".join(place["text"] for place in ours)
        cells = nbformat.read(path, 4).cells
        for cell in cells:
            if has(cell, "solution"):
                assert " ".join(cell.source.split()) not in said, path.name
            elif cell.cell_type == "code":
                code = unicodedata.normalize("NFKC", " ".join(cell.source.split()))
                assert code in said, path.name
        answers = [tag.get_text() for tag in page("details", class_=None) if tag.p]
        assert answers and all(" ".join(answer.split()) not in said for answer in answers)


def test_pages_have_no_script_but_figures_to_touch_and_hold_their_pictures_and_formulas(
    built, lessons
):
    for path in lessons:
        page = BeautifulSoup(
            (built / "pages" / f"{path.stem}.html").read_text("utf-8"), "html.parser"
        )
        cells = nbformat.read(path, 4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        pictures += markdown(path).count("](../imgs/")
        touched = sum(
            '<div class="touch"' in out.get("data", {}).get("text/html", "") for out in outputs
        )
        formulas = re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", markdown(path), re.S)
        *scripts, search = page("script")
        assert len(scripts) == len(page.select(".touch + script")) == touched, path.name
        assert search.attrs == {"src": "book.js"} and not search.string, path.name
        assert len(page("main")) == 1, path.name
        assert len(page("img", src=re.compile("^data:image/"))) == pictures + touched, path.name
        assert len(page("math")) == len(formulas), path.name
        assert "\n.highlight .k {" in page.style.string, "code is coloured"


def test_solutions_are_folded_and_outputs_can_be_scrolled_with_the_keyboard(built, lessons):
    for path in lessons:
        page = BeautifulSoup(
            (built / "pages" / f"{path.stem}.html").read_text("utf-8"), "html.parser"
        )
        cells = nbformat.read(path, 4).cells
        solutions = [cell for cell in cells if has(cell, "solution")]
        folded = page("details", {"class": "solution", "open": False})
        assert len(folded) == len(page(class_="celltag_solution")) == len(solutions) > 0, path.name
        hidden = [c for c in cells if c.metadata.get("jupyter", {}).get("source_hidden")]
        assert len(page.select("details .input")) == len(hidden), path.name
        checks = page(class_="celltag_check")
        assert all(cell.find("details").summary.string == "The check" for cell in checks)
        assert all(not cell.select("details .output") for cell in checks), "a verdict is shown"
        outputs = page.select(".output pre")
        assert outputs and all(pre.get("tabindex") == "0" for pre in outputs), path.name
        assert not page.select(".input pre[tabindex]"), path.name


def test_students_get_stubs_and_checks_and_no_solution_and_no_output(built, lessons):
    for path in lessons:
        given, whole = nbformat.read(built / "students" / path.name, 4), nbformat.read(path, 4)
        nbformat.validate(given)
        kept = [cell.source for cell in whole.cells if not has(cell, "solution")]
        assert [cell.source for cell in given.cells] == kept != [c.source for c in whole.cells]
        for tag in ("exercise", "check", "hint"):
            assert any(has(cell, tag) for cell in given.cells), (path.name, tag)
        for cell in given.cells:
            assert not cell.get("outputs") and not cell.get("execution_count"), path.name
        solution = built / "solutions" / path.name
        assert solution.read_text("utf-8") == path.read_text("utf-8")


def test_students_need_nothing_that_only_a_solution_brings():
    for path in LESSONS:
        bound: dict[bool, set[str]] = {True: set(), False: set()}  # by whether it is a solution
        used = set()
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                nodes = list(ast.walk(ast.parse(cell.source)))
                bound[has(cell, "solution")].update(name for node in nodes for name in binds(node))
                if not has(cell, "solution"):
                    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
        missing = used & (bound[True] - bound[False])
        assert not missing, f"{path.name} uses {missing}, which only a solution defines"


def binds(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return [node.id] if stored else [node.arg] if isinstance(node, ast.arg) else []


# --- the check itself: what is broken is found

BROKEN = {
    '<script src="https://cdn.example/x.js"></script>': "loads https://cdn.example/x.js",
    '<script src="book.js"></script>': "loads book.js",
    '<script>import("https://cdn.example/x.mjs")</script>': "loads https://cdn.example/x.mjs",
    '<link rel="stylesheet" href="style.css">': "loads style.css",
    '<img src="../imgs/amp_step.svg">': "loads ../imgs/amp_step.svg",
    '<img srcset="a.png 2x">': "loads a.png",
    "<style>@font-face { src: url(font.woff2) }</style>": "loads font.woff2",
    '<p style="background: url(back.png)">': "loads back.png",
    '<a href="14_gone.html">next</a>': "links to 14_gone.html",
    '<a href="#nowhere">there</a>': "links to #nowhere",
    '<a href="other.html#nowhere">there</a>': "links to other.html#nowhere",
    '<a href="http://example.org">there</a>': "links to http://example.org",
    "<p>The floor is $2^{-24}$.</p>": "shows $2^{-24}$",
}


def test_what_is_broken_is_found(tmp_path):
    (tmp_path / "other.html").write_text('<h1 id="here"><a href="#here">x</a></h1>', "utf-8")
    for html, complaint in BROKEN.items():
        (tmp_path / "page.html").write_text(f"<body>{html}</body>", "utf-8")
        assert complaints(tmp_path) == [f"page.html {complaint}"]
    (tmp_path / "page.html").unlink()
    text = "# Recap\n[a](#Recap) [b](gone.ipynb) [c](#Nowhere) `[d](code)`"
    cells = [nbformat.v4.new_markdown_cell(text)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "x.ipynb")
    name = f"{tmp_path.name}/x.ipynb"
    assert complaints(tmp_path) == [f"{name} links to gone.ipynb", f"{name} links to #Nowhere"]


# --- building


def test_a_build_takes_the_place_of_the_one_before_and_equals_it(small, capsys):
    assert main(["--root", str(small), "handout"]) == 0
    assert "1 lessons are in course/build/handout: open index.html" in capsys.readouterr().out
    before = contents(small)
    (small / "build" / "handout" / "pages" / "gone.html").touch()
    assert main(["--root", str(small), "handout"]) == 0
    assert contents(small) == before
    assert [path.name for path in (small / "build").iterdir()] == ["handout"]


FAULTS = {
    r"$\nosuchcommand{x}$": r"cannot be handed out: The formula $\nosuchcommand{x}$ cannot",
    "![a picture](../imgs/gone.svg)": "The picture gone.svg is not a file",
    "[next](99_gone.ipynb)": "00_start_here.ipynb links to 99_gone.ipynb, which is no file of the",
    "[notes](../../notes.txt)": "links to ../../notes.txt, which is no file of the course.",
}


@pytest.mark.parametrize(("text", "sentence"), FAULTS.items())
def test_what_cannot_be_handed_out_is_a_sentence_and_the_old_handout_stays(
    small, text, sentence, capsys
):
    (small.parent / "notes.txt").touch()
    (small / "build" / "handout").mkdir(parents=True)
    (small / "build" / "handout" / "old").touch()
    edit(small, "## Recap", f"{text}\n\n## Recap")
    assert main(["--root", str(small), "handout"]) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert [path.name for path in (small / "build").rglob("*")] == ["handout", "old"]


@pytest.mark.parametrize("text", ["{", "[]", '{"nbformat": 4, "cells": [{"source": 1}]}', None])
def test_a_damaged_notebook_is_a_sentence(small, text, capsys):
    path = small / "notebooks" / TWO[0].name
    path.unlink() if text is None else path.write_text(text, "utf-8")
    expected = "There are no lessons in" if text is None else "is damaged or not a notebook"
    assert main(["--root", str(small), "handout"]) in (1, 2)
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_a_notebook_without_a_card_is_a_sentence(small, capsys):
    edit(small, "**Minutes**", "**Hours**")
    assert main(["--root", str(small), "handout"]) == 1
    expected = "00_start_here.ipynb: the card has no row **Minutes**.\n"
    assert capsys.readouterr().err == expected


def test_an_interruption_at_the_last_moment_leaves_the_old_handout(small, monkeypatch):
    old = small / "build" / "handout"
    old.mkdir(parents=True)
    (old / "old").touch()

    def interrupted(path, target):
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handout.build(small / "notebooks", old)
    assert [path.name for path in (small / "build").rglob("*")] == ["handout", "old"]


def test_a_linked_file_is_taken_along(small):
    (small / "notebooks" / "ledger.md").write_text("# Ledger", "utf-8")
    edit(small, "## Recap", "[ledger](ledger.md#Ledger)\n\n## Recap")
    assert main(["--root", str(small), "handout"]) == 0
    for folder in ("students", "solutions", "pages"):
        assert (small / "build" / "handout" / folder / "ledger.md").read_text("utf-8") == "# Ledger"


def test_text_on_a_page_is_escaped():
    text = pages.page("lesson.html.j2", title="a < <b>b</b>", body="<p>text</p>")
    page = BeautifulSoup(text, "html.parser")
    assert page.title.string == "a < <b>b</b>" and page.main.p.string == "text"


def test_a_formula_keeps_its_characters():
    assert "<mi>λ</mi>" in pages.mathml(r"\lambda")
    assert "max_norm" in pages.mathml(r"\text{max\_norm}")
    assert 'display="block"' in pages.mathml("x", display=True)
    with pytest.raises(CourseError, match=r"^The formula \$\\nosuch\$ cannot be shown offline"):
        pages.mathml(r"\nosuch")


# --- in a browser, from the disk

in_a_browser = pytest.mark.parametrize(
    "course", [pytest.param("the course", marks=pytest.mark.full)], indirect=True
)


@in_a_browser
def test_the_search_finds_the_lesson_first(built, visit):
    page = visit(built / "index.html")
    box, first = page.get_by_role("searchbox"), page.locator("#found a").first
    for words, lesson in {
        "subnormal": "1 · Float formats",
        "unscale_ clip": "7 · Clipping unscaled gradients",
        "Kahan": "15 · The precision ladder",
        "checkpoint": "11 · Checkpoints and inference",
    }.items():
        box.fill(words)
        assert first.inner_text().startswith(lesson), words
    box.fill("zzzz")
    assert (
        page.get_by_role("status").inner_text() == "0 sections"
        and not page.locator("#found a").all()
    )
    box.fill("checkpoint")
    box.press("Enter")
    page.wait_for_url("**/pages/11_checkpoint_and_inference.html#*")
    page.get_by_role("searchbox").fill("GradScaler")
    assert not page.get_by_role("main").is_visible()
    page.get_by_role("searchbox").fill("")
    assert page.get_by_role("main").is_visible()


@in_a_browser
def test_without_a_script_all_but_the_search_is_there(built, visit):
    page = visit(built / "pages" / "06_grad_scaler.html", java_script_enabled=False)
    assert not page.get_by_role("searchbox").is_visible()
    page.get_by_role("navigation").get_by_role("link", name="The flight recorder").click()
    assert page.url.endswith("#The-flight-recorder")
    page.get_by_role("navigation").get_by_role("link", name="7 · Clipping").click()
    assert page.get_by_role("heading", level=1).inner_text().startswith("7 · Clipping")


@in_a_browser
def test_pages_are_accessible_and_fit_the_window(built, visit):
    for name in ("index.html", "pages/06_grad_scaler.html", "pages/claims.html"):
        page = visit(built / name, viewport={"width": 360, "height": 800})
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        for width in (360, 1200):
            page.set_viewport_size({"width": width, "height": 800})
            assert violations(page, dark=width == 360) == "", name
    for path in (built / "index.html", *(built / "pages").glob("*.html")):
        page = visit(path)
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        for width in (360, 800, 1200):
            page.set_viewport_size({"width": width, "height": 800})
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide == width, f"{path.name} is wider than the window"
        page.close()
    page = visit(built / "index.html")
    page.evaluate(
        "document.querySelector('p').style.color = document.body.style.background = '#888'"
    )
    assert violations(page).count("color-contrast") == 2, "axe sees what is wrong, dark and light"


@pytest.mark.full
def test_slides_are_accessible(tmp_path, visit):
    copy_course(tmp_path, TWO)
    assert main(["--root", str(tmp_path), "slides", "00", "--no-browser"]) == 0
    page = visit(tmp_path / "build" / "slides" / "00_start_here.html")
    places = page.evaluate("Reveal.getSlides().map(slide => Reveal.getIndices(slide))")
    assert len(places) > 15
    longer, top = 0, "Reveal.getCurrentSlide().scrollTop"
    for place in places:
        page.evaluate("({h, v}) => Reveal.slide(h, v, 99)", place)
        dark = place in places[:10]  # text, code, outputs and pictures are among them
        assert violations(page, ".present:not(.stack)", dark) == "", place
        if page.evaluate("long(Reveal.getCurrentSlide())"):
            longer += 1
            page.keyboard.press("ArrowDown")
            page.wait_for_function(f"{top} > 0")
    assert violations(page) == "" and longer
