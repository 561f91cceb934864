"""``python -m flashkernel``: where a build finds FlashKernel's C++ side; anything else goes to the command line tool.

--version      the version
--cmake-dir    folder of flashkernel-config.cmake, for -Dflashkernel_DIR
--include-dir  folder of the headers
"""

from __future__ import annotations

import os
import sys

import flashkernel


def _find(*parts: str) -> str:
    # An editable install has several folders: the sources and the place where CMake installed.
    for folder in flashkernel.__path__:
        path = os.path.join(folder, *parts)
        if os.path.isdir(path):
            return path
    raise SystemExit(f"flashkernel: no {'/'.join(parts)} in {list(flashkernel.__path__)}; is the package installed?")


def cmake_dir() -> str:
    """Folder of flashkernel-config.cmake."""
    return _find("lib", "cmake", "flashkernel")


def include_dir() -> str:
    """Folder of the C++ headers."""
    return _find("include")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    answers = {"--version": lambda: flashkernel.__version__, "--cmake-dir": cmake_dir, "--include-dir": include_dir}
    if len(arguments) == 1 and arguments[0] in answers:
        print(answers[arguments[0]]())
        return 0
    from flashkernel.cli import main as cli_main

    return cli_main(arguments) or 0


if __name__ == "__main__":
    raise SystemExit(main())
