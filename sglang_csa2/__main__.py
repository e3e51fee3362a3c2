"""`python -m sglang_csa2 doctor | plan | show | verify`; the commands live in `tools`, each loaded when it is named."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

_COMMANDS = {
    "doctor": "whether csa2 can serve on this machine, and by which kernels",
    "plan": "how much context and how many requests fit, against the host's own layout",
    "show": "the layer map, and what the layers of a served model read",
    "verify": "a server's answers against the plain model, or against a recording",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    # Before torch is loaded, and for engines too: idle OpenMP threads spin, which makes a small machine several times
    # slower. The scripts choose the same (scripts/environment.sh).
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(prog="python -m sglang_csa2", description="Tools of the csa2 backend.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if argv[:1] == [name]:
            try:
                module = importlib.import_module(f"sglang_csa2.tools.{name}")
            except ModuleNotFoundError as error:
                print(f"{name} needs the package {error.name}, which {sys.executable} does not have", file=sys.stderr)
                return 2
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is left must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        # These name the value, the rule and the remedy; a traceback would bury them.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
