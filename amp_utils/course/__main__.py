"""The command line of the toolbox. Each command is a module, imported only when it is called."""

import signal
import sys
from importlib import import_module
from pathlib import Path

import click

from amp_utils.course import ROOT, CourseError, shown
from amp_utils.lesson import ParameterError

COMMANDS = {
    "run": "run lessons with parameters, or keep their outputs",
    "sweep": "run a lesson for all combinations of values",
    "outline": "rewrite navigation, course map and slide metadata",
    "claims": "measure every claim of the sources and write the ledger",
    "handout": "build what a class gets: notebooks and offline pages",
    "slides": "show a lesson as a presentation",
    "bench": "measure speed-ups and the cost of the instruments",
}


class Toolbox(click.Group):
    """A group whose commands are named `command` in the modules of their names."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return import_module(f"amp_utils.course.{name}").command if name in COMMANDS else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, context: click.Context) -> int:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:  # click would print an empty line first
            raise CourseError("Interrupted: nothing half-done is left behind.", 130) from None


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
    except click.ClickException as error:
        sentence, status = error.format_message(), error.exit_code
    except ParameterError as error:
        sentence, status = str(error), 2
    except CourseError as error:
        sentence, status = str(error), error.status
    except OSError as error:
        where = f"{shown(Path(error.filename))}: " if error.filename else ""
        sentence, status = f"{where}{error.strerror or error}.", 1
    print(sentence, file=sys.stderr)
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leave no kernel behind
    sys.exit(main(sys.argv[1:]))
