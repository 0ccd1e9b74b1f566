"""python -m bench figures [FOLDER]      makes every committed table and plot again from the committed JSON
python -m bench again [--only TEXT] [--cpu] [--out FOLDER] [--list]      measures the committed JSON again, says what moved
python -m bench compare OLD.json NEW.json                                says what moved between two files
"""

import argparse
import sys
from pathlib import Path


def figures(arguments: argparse.Namespace) -> int:
    from bench.figures import make

    for path in make(arguments.folder):
        print(path)
    return 0


def again(arguments: argparse.Namespace) -> int:
    from bench.again import run

    return run(arguments.only, arguments.cpu, arguments.out, arguments.list)


def compare(arguments: argparse.Namespace) -> int:
    from bench.again import report, tell

    return tell([report(arguments.old, arguments.new)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Figures that anyone can check again.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("figures", help="make every committed table and plot again from the committed JSON")
    command.add_argument("folder", type=Path, nargs="?", help="where they go (default: their places in the checkout)")
    command.set_defaults(run=figures)
    command = commands.add_parser("again", help="measure the committed JSON again, and say what moved by more than its spread")
    command.add_argument("--only", default="", metavar="TEXT", help="files whose name contains this")
    command.add_argument("--cpu", action="store_true", help="those of the CPU, in place of those of the GPU")
    command.add_argument("--out", type=Path, default=Path("build/again"), help="where the new files go (default: %(default)s)")
    command.add_argument("--list", action="store_true", help="print what would run, and stop")
    command.set_defaults(run=again)
    command = commands.add_parser("compare", help="say what moved between two files of one script")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.set_defaults(run=compare)
    arguments = parser.parse_args()
    try:
        return arguments.run(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
