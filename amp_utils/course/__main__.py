"""The command line of the toolbox. Each command is a module, imported only when it is called."""

import signal
import sys
from importlib import import_module
from pathlib import Path

import click

from amp_utils.course import ROOT, CourseError
from amp_utils.lesson import ParameterError

COMMANDS = {
    "lab": "open the course in JupyterLab",
    "run": "run lessons with parameters, or keep their outputs",
    "sweep": "run a lesson for all combinations of values",
    "outline": "bring navigation, course map and slides up to date",
    "claims": "measure the claims of the sources and write the ledger",
    "progress": "show which predictions were right and which exercises are solved",
    "handout": "build what a class gets: notebooks and offline pages",
    "slides": "show a lesson as a presentation",
    "gpu": "run everything on a GPU, without Jupyter; adopt what it measured",
    "bench": "measure gains and overheads as ratios",
}


class Toolbox(click.Group):
    """A group whose commands are named `command` in the modules of their names."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return import_module(f"amp_utils.course.{name}").command if name in COMMANDS else None


@click.command(cls=Toolbox)
@click.option("--root", type=Path, default=ROOT, metavar="DIR", help="the course's folder")
@click.pass_context
def toolbox(context: click.Context, root: Path) -> None:
    """Build, run, check and publish the lessons of Mixed Precision, Hands On."""
    if not (root / "notebooks").is_dir():
        raise CourseError(f"root = '{root}' is not allowed: give a folder with notebooks/.", 2)
    context.obj = root.resolve()


def main(arguments: list[str]) -> int:
    """The exit status: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C or SIGTERM."""
    try:
        return toolbox.main(arguments, "python -m amp_utils.course", standalone_mode=False) or 0
    except click.Abort:
        sentence, status = "Interrupted: nothing half-done is left behind.", 130
    except click.ClickException as error:
        sentence, status = error.format_message(), error.exit_code
    except ParameterError as error:
        sentence, status = str(error), 2
    except OSError as error:
        sentence, status = f"{error}.", 1
    print(sentence, file=sys.stderr)
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leave no kernel behind
    sys.exit(main(sys.argv[1:]))
