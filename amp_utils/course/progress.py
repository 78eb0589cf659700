"""Your own progress as a table: exercises solved, predictions right, and those that were wrong."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from amp_utils.course import LEARN, notebook
from amp_utils.progress import load


def question(cell: notebook.Cell) -> str:
    """The first line of a prediction, without its mark."""
    return (
        cell.source.splitlines()[0].removeprefix("**Predict.**").removeprefix("**Find.**").strip()
    )


@click.command(help="Show which predictions were right and which exercises are solved.")
@click.pass_obj
def command(root: Path) -> None:
    folder = next(filter(Path.is_dir, (root / LEARN, root / "notebooks")))
    verdicts, wrong, following = load(folder / "progress.json"), [], None
    table = Table("lesson", "exercises", "right guesses", box=None, pad_edge=False)
    for path in notebook.lessons(folder):
        number, cells = path.stem.split("_")[0], notebook.cells(path)
        asked = {
            f"{number}/predict{i}": question(cell)
            for i, cell in enumerate((cell for cell in cells if "predict" in cell.tags), 1)
        }
        tasks = [
            f"{number}/ex{i + 1}" for i in range(sum("exercise" in cell.tags for cell in cells))
        ]
        solved = sum(verdicts.get(task) == "correct" for task in tasks)
        right = sum(verdicts.get(place) == "right" for place in asked)
        wrong += [(path, asked[place]) for place in asked if verdicts.get(place) == "wrong"]
        if solved < len(tasks) and following is None:
            following = path
        table.add_row(path.stem, f"{solved} of {len(tasks)}", f"{right} of {len(asked)}")
    console = Console(highlight=False, markup=False)
    console.print(table)
    if wrong:
        console.print("\nPredictions that were wrong; the lesson says why:")
    for path, text in wrong:
        console.print(f"  {folder.name}/{path.name}: {text}", soft_wrap=True)
    done = f"Next: {folder.name}/{following.name}" if following else "Every exercise is solved."
    console.print(f"\n{done}")
