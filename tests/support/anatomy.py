"""The rules that every lesson keeps: one small function each, which returns its complaints."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

import nbformat
from nbformat import NotebookNode

from amp_utils.course import CourseError, outline
from amp_utils.course.notebook import tags

Rule = Callable[[NotebookNode, Path], list[str]]
RULES: dict[str, Rule] = {}

OLD_NAMES = (
    r"torch\.cuda\.amp|from torch\.cuda import amp|torch\.cpu\.amp"
    r"|reset_max_memory_allocated|torch\.cuda\.(?:Half|Float)Tensor|torch\.jit\b"
    r"|get_autocast_gpu_dtype|get_autocast_cpu_dtype|allow_tf32|torch\.autocast_mode"
)

# An absolute path that not every Linux has, an address in memory, an edit of the search path.
PRIVATE = (
    r"""(?m:^|(?<=[\s"'`(=>]))/(?!dev/|proc/)\w[\w.-]*/[a-zA-Z_.][\w.-]*"""
    r"|\b[A-Z]:\\\w+|0x[0-9a-f]{9,}|sys\.path\b"
)

CLOCK = re.compile(r"\bcompare\(|\bperf_counter\(|\btiming\.\w+\(")


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def complaints(nb: NotebookNode, path: Path) -> list[str]:
    """All complaints about a lesson, each with the names of the lesson and the rule before it."""
    return [
        f"{path.stem}, {name}: {text}" for name, rule in RULES.items() for text in rule(nb, path)
    ]


def code(nb: NotebookNode) -> list[tuple[int, NotebookNode]]:
    return [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "code"]


def prose(nb: NotebookNode) -> list[tuple[int, NotebookNode]]:
    return [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "markdown"]


def printed(cell: NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def tree(cell: NotebookNode) -> ast.Module:
    try:
        return ast.parse(cell.source)
    except SyntaxError:  # a magic such as !pip, which nothing_is_fetched complains of
        return ast.Module(body=[], type_ignores=[])


@rule
def card_is_complete(nb, path):
    try:
        card = outline.card(nb.cells, "Cell 0")
    except CourseError as error:
        return [str(error)]
    complaints = (
        [] if 3 <= len(card.learn) <= 5 else [f"Cell 0: {len(card.learn)} objectives; give 3 to 5."]
    )
    numbered = re.findall(r"(?:\| |<br>)(\d)\. ", nb.cells[0].source)
    if numbered != [str(i + 1) for i in range(len(card.learn))]:
        complaints.append("Cell 0: the objectives are not numbered 1, 2, 3.")
    return (
        complaints if card.minutes.isdigit() else [*complaints, "Cell 0: Minutes is not a number."]
    )


@rule
def parameters_come_first_typed_and_explained(nb, path):
    (i, first), *_ = code(nb)
    if "parameters" not in tags(first):
        return [f"Cell {i}: the first code cell is not tagged `parameters`."]
    if not first.source.strip():
        return [f"Cell {i}: the parameters cell is empty."]
    pattern = re.compile(r"\w+: (?:str|int|float|bool) = \S.*  # \S.+")
    return [
        f"Cell {i}: `{line}` is not `name: type = value  # help`."
        for line in first.source.splitlines()
        if not pattern.fullmatch(line)
    ]


@rule
def parameters_are_validated_next(nb, path):
    (_, first), (i, second), *_ = code(nb)
    names = re.findall(r"^(\w+):", first.source, re.M)
    missing = [
        name for name in names if name != "device" and f"{name}=lesson." not in second.source
    ]
    complaints = [f"Cell {i}: the parameter {name} is not validated." for name in missing]
    if "choose_device(device)" not in second.source:
        complaints.append(f"Cell {i}: `device` does not go through choose_device.")
    return complaints


@rule
def predictions_are_committed_and_answered(nb, path):
    asked = [i for i, cell in prose(nb) if "predict" in tags(cell)]
    complaints = [] if len(asked) >= 2 else [f"{len(asked)} predictions; ask at least 2."]
    for i in asked:
        if not nb.cells[i].source.startswith(("**Predict.**", "**Find.**")):
            complaints.append(f"Cell {i}: a prediction begins with **Predict.** or **Find.**")
        guess, *following = nb.cells[i + 1 : i + 8]
        name = re.fullmatch(r"(guess\w*) = None  # \S.+", guess.source)
        if "guess" not in tags(guess) or not name:
            complaints.append(f"Cell {i + 1}: it is not `guess = None  # what may be guessed`.")
            continue
        judged = [f"lesson.predict({name[1]}, " in cell.source for cell in following]
        answered = ["<summary>Answer</summary>" in cell.source for cell in following]
        if not any(judged):
            complaints.append(f"Cell {i}: no lesson.predict({name[1]}, …) follows soon.")
        if not any(answered):
            complaints.append(f"Cell {i}: no <summary>Answer</summary> follows soon.")
    return complaints


@rule
def an_answer_that_a_clock_decides_is_not_compared(nb, path):
    clocked, complaints = False, []
    for i, cell in code(nb):
        clocked = "guess" not in tags(cell) and (clocked or CLOCK.search(cell.source))
        if "lesson.predict(" in cell.source:
            if clocked and "nbval-ignore-output" not in tags(cell):
                complaints.append(f"Cell {i}: a clock decides the answer: do not compare it.")
            clocked = False
    return complaints


@rule
def exercises_have_their_shape(nb, path):
    starts = [i for i, cell in prose(nb) if "exercise-text" in tags(cell)]
    complaints = [] if 2 <= len(starts) <= 4 else [f"{len(starts)} exercises; give 2 to 4."]
    for number, i in enumerate(starts, 1):
        parts = nb.cells[i : i + 5]
        shape = [part for cell in parts for part in sorted(tags(cell))]
        if shape != ["exercise-text", "exercise", "check", "hint", "solution"]:
            complaints.append(f"Cell {i}: the parts of the exercise are {shape}.")
            continue
        text, stub, check, hint, solution = parts
        if not re.match(rf"### Exercise {number} · .+ \([●○]{{3}}, \d+ min\)\n", text.source):
            complaints.append(f"Cell {i}: the heading lacks number, title, difficulty or minutes.")
        if "raise NotImplementedError" not in stub.source:
            complaints.append(f"Cell {i + 1}: the stub does not raise NotImplementedError.")
        if "<summary>Hint</summary>" not in hint.source:
            complaints.append(f"Cell {i + 3}: the hint is not collapsed.")
        if not solution.source.startswith(f"# Solution of exercise {number}\n"):
            complaints.append(
                f"Cell {i + 4}: it begins with another line than # Solution of exercise {number}."
                " JupyterLab shows that line of a collapsed solution, so it must tell nothing."
            )
        if not solution.metadata.get("jupyter", {}).get("source_hidden"):
            complaints.append(
                f"Cell {i + 4}: the solution is not collapsed (jupyter.source_hidden)."
            )
        if not printed(check).startswith("✎"):
            complaints.append(f"Cell {i + 2}: the check does not find the stub unattempted.")
        if not printed(solution).endswith("✓ correct\n") or "✗" in printed(solution):
            complaints.append(f"Cell {i + 4}: the solution does not pass its check.")
    return complaints


@rule
def patients_have_their_shape(nb, path):
    complaints = []
    for i, cell in prose(nb):
        heading = re.match(r"### Patient (\d+) · \S", cell.source)
        if "patient" not in tags(cell) or not heading:
            continue
        n, shape = heading[1], [{"patient", "predict"}, {"guess"}, {"exercise"}, {"solution"}]
        loop, guess, repair, mended, answer = nb.cells[i + 1 : i + 6]
        if not all(part <= tags(c) for part, c in zip(shape, nb.cells[i + 1 :], strict=False)):
            complaints.append(f"Cell {i}: the parts of patient {n} are out of order.")
        if not loop.source.startswith(f"@ward.admit({n})\n") or not printed(loop):
            complaints.append(f"Cell {i + 1}: patient {n} is not admitted, or shows no signs.")
        if f"lesson.predict(guess_{n}, " not in repair.source or f"guess_{n} =" not in guess.source:
            complaints.append(f"Cell {i + 2}: the diagnosis of patient {n} is not judged.")
        if "raise NotImplementedError" not in repair.source or printed(repair).count("✎") != 2:
            complaints.append(f"Cell {i + 3}: patient {n} is not left to the learner.")
        if not printed(mended).startswith("✓ correct\nthe doctor, before: "):
            complaints.append(f"Cell {i + 4}: patient {n} is not mended, or no doctor was asked.")
        hidden = mended.metadata.get("jupyter", {})
        if not (hidden.get("source_hidden") and hidden.get("outputs_hidden")):
            complaints.append(f"Cell {i + 4}: the repair of patient {n} is not collapsed.")
        if "<summary>Answer</summary>" not in answer.source:
            complaints.append(f"Cell {i + 5}: the illness of patient {n} is not explained.")
        if max(len(c.source.splitlines()) for c in (loop, mended)) > 20:
            complaints.append(f"Cell {i + 1}: the loop of patient {n} has over 18 lines.")
    return complaints


@rule
def numbers_rather_than_booleans(nb, path):
    lines = [line for _, cell in code(nb) for line in printed(cell).splitlines() if line.strip()]
    booleans = [line for line in lines if re.search(r"\b(True|False)\b", line)]
    if 10 * len(booleans) > len(lines):
        return [f"{len(booleans)} of {len(lines)} printed lines say True or False: {booleans[0]}"]
    return []


@rule
def recap_answers_every_objective(nb, path):
    recaps = [
        (i, cell.source) for i, cell in prose(nb) if re.search(r"^## Recap$", cell.source, re.M)
    ]
    if len(recaps) != 1:
        return [f"{len(recaps)} recaps; give one, headed `## Recap`."]
    i, source = recaps[0]
    items = re.findall(r"^\d\. (.+)$", source.split("## Recap")[1], re.M)
    objectives = re.findall(r"(?:\| |<br>)\d\. ", nb.cells[0].source)
    complaints = []
    if len(items) != len(objectives):
        complaints.append(f"Cell {i}: {len(items)} answers to {len(objectives)} objectives.")
    return complaints + [
        f"Cell {i}: `{item[:40]}…` points at nothing shown." for item in items if "`" not in item
    ]


@rule
def navigation_is_up_to_date(nb, path):
    last = nb.cells[-1]
    navigation = outline.generated("navigation", path.parent, lesson=path.stem)
    if "navigation" not in tags(last) or last.source != navigation:
        return [
            "The last cell is not the navigation, or is stale: "
            "run python -m amp_utils.course outline."
        ]
    return []


@rule
def pictures_have_alt_text_and_are_local(nb, path):
    complaints = []
    for i, cell in prose(nb):
        for alt, target in re.findall(r"!\[(.*?)\]\((.*?)\)", cell.source):
            if len(alt) < 15:
                complaints.append(f"Cell {i}: the picture {target} has no alt text.")
            if (
                not re.fullmatch(r"\.\./imgs/\w+\.svg", target)
                or not (path.parent / target).exists()
            ):
                complaints.append(f"Cell {i}: the picture {target} is not one of ../imgs/*.svg.")
        if "<img" in cell.source:
            complaints.append(f"Cell {i}: a picture in HTML; use ![alt](../imgs/name.svg).")
    for i, cell in code(nb):
        for output in cell.outputs:
            shown = output.get("data", {})
            if "image/png" in shown and not output.metadata.get("image/png", {}).get("alt"):
                complaints.append(
                    f"Cell {i}: a figure without alt text; draw it with amp_utils.plots."
                )
    return complaints


def headings(path):
    """The headings of a notebook, or of a Markdown file, as links name them."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for _, cell in prose(nbformat.reads(text, 4)))
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [heading.strip().replace(" ", "-").lower() for heading in found]


@rule
def links_lead_somewhere(nb, path):
    complaints = []
    for i, cell in prose(nb):
        for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", cell.source):
            if target.startswith(("https://", "#")):
                continue
            file, _, heading = target.partition("#")
            there = path.parent / file
            if not there.exists() or (heading and heading.lower() not in headings(there)):
                complaints.append(f"Cell {i}: the link {target} leads nowhere.")
    return complaints


@rule
def code_cells_are_short(nb, path):
    lengths = {
        i: len(cell.source.splitlines())
        for i, cell in code(nb)
        if not {"guess", "patient"} & tags(cell)  # a patient has a limit of its own
    }
    complaints = [
        f"Cell {i}: {n} lines; no cell has more than 30." for i, n in lengths.items() if n > 30
    ]
    middle = median(n for i, n in lengths.items() if not outline.FOLDED & tags(nb.cells[i]))
    return (
        complaints
        if middle <= 8
        else [*complaints, f"The median open code cell has {middle} lines, more than 8."]
    )


@rule
def bookkeeping_is_folded(nb, path):
    """JupyterLab shows the first line of a folded cell, so that line says what it is."""
    return [
        f"Cell {i}: it records; tag it `record`, and begin it with a comment."
        for i, cell in code(nb)
        if re.search(r"^lesson\.record\(", cell.source, re.M)
        and not ("record" in tags(cell) and cell.source.startswith("# "))
    ]


@rule
def words_are_enough_and_not_too_many(nb, path):
    free = {"navigation", "course-map", "entrances", "glossary", "patient"}  # they grow
    words = sum(len(cell.source.split()) for _, cell in prose(nb) if not free & tags(cell))
    most = 2000 if path.stem[:2] in ("15", "16") else 1481
    return [] if 800 <= words <= most else [f"{words} words of text; give 800 to {most}."]


@rule
def executed_from_top_to_bottom(nb, path):
    counts = [cell.execution_count for _, cell in code(nb)]
    return (
        [] if counts == list(range(1, len(counts) + 1)) else [f"The execution counts are {counts}."]
    )


@rule
def nothing_failed_or_warned(nb, path):
    complaints = []
    for i, cell in code(nb):
        for output in cell.outputs:
            if output.output_type == "error":
                complaints.append(f"Cell {i}: an error is stored: {output.ename}.")
            if output.get("name") == "stderr":
                complaints.append(f"Cell {i}: stderr is stored: {output.text.splitlines()[0]}")
    return complaints


@rule
def outputs_are_stored(nb, path):
    """nbval lets a notebook pass whose outputs were stripped."""
    complaints = []
    for i, cell in code(nb):
        calls = [
            ast.unparse(node.func)
            for node in ast.walk(_top_level(tree(cell)))
            if isinstance(node, ast.Call)
        ]
        speaks = any(
            call in ("print", "lesson.predict", "lesson.record")
            or call.startswith(("plots.", "touch."))
            for call in calls
        )
        if (speaks or tags(cell) & {"check", "solution"}) and not cell.outputs:
            complaints.append(f"Cell {i}: it prints or draws, and no output is stored.")
    return complaints


def _top_level(module: ast.Module) -> ast.Module:
    """The module without the bodies of its functions and classes, which may never be called."""
    kept = [node for node in module.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ast.Module(body=kept, type_ignores=[])


@rule
def no_old_names(nb, path):
    return [
        f"Cell {i}: {found} is an old name."
        for i, cell in enumerate(nb.cells)
        if "old-names" not in tags(cell)
        for found in re.findall(OLD_NAMES, cell.source)
    ]


@rule
def kernel_is_python3(nb, path):
    name = nb.metadata.get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"The kernelspec is {name!r}, not 'python3'."]


@rule
def few_outputs_are_ignored(nb, path):
    cells = [(i, cell) for i, cell in code(nb) if "guess" not in tags(cell)]
    ignored = sum("nbval-ignore-output" in tags(cell) for _, cell in cells)
    complaints = (
        []
        if 4 * ignored <= len(cells)
        else [f"{ignored} of {len(cells)} cells have ignored outputs."]
    )
    other = {tag for _, cell in cells for tag in tags(cell) if tag.startswith(("nbval", "NBVAL"))}
    return complaints + [
        f"The tag {tag} is not used here." for tag in sorted(other - {"nbval-ignore-output"})
    ]


@rule
def no_commented_out_code(nb, path):
    complaints = []
    for i, cell in code(nb):
        for line in cell.source.splitlines():
            comment = line.strip().removeprefix("#").strip() if line.strip().startswith("#") else ""
            if re.search(
                r"^\w+(\.\w+)*\(.*\)$|^\w+ = \S+|^(with|for|if|return|import|from) .*[:)]$", comment
            ):
                complaints.append(f"Cell {i}: commented-out code: {line.strip()}")
    return complaints


@rule
def loops_really_run(nb, path):
    """A loop over a literal that is empty teaches nothing."""
    empty = ("range(0)", "[]", "()", "{}")
    return [
        f"Cell {i}: the loop over {ast.unparse(node.iter)} never runs."
        for i, cell in code(nb)
        for node in ast.walk(tree(cell))
        if isinstance(node, ast.For) and ast.unparse(node.iter) in empty
    ]


@rule
def nothing_is_fetched(nb, path):
    fetching = (
        r"[!%]pip|[!%]conda|!wget|!curl|urllib|\brequests\.|torch\.hub|from_url|download=True"
    )
    return [
        f"Cell {i}: `{found}` needs the network; a lesson makes its data on the spot."
        for i, cell in code(nb)
        for found in re.findall(fetching, cell.source)
    ]


@rule
def nothing_of_this_machine_is_stored(nb, path):
    complaints = []
    for i, cell in enumerate(nb.cells):
        texts = [cell.source]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts += [output.get("text", ""), *(data[kind] for kind in data if "text" in kind)]
        for found in re.findall(PRIVATE, "\n".join(texts)):
            complaints.append(f"Cell {i}: `{found}` belongs to one machine, not to a lesson.")
    return complaints
