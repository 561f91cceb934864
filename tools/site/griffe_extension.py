"""What griffe, which reads Python for the reference without running it, cannot know of `flashkernel`.

The compiled module's functions stand in its stub as overloads alone, for which griffe makes no function, and
`flashkernel.__all__` is made when the package is imported. Docstrings become Markdown here.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.site.plain import docstring

# That `__all__` is not text alone is no fault of a page.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "flashkernel.__all__" not in record.getMessage())


def _functions(owner: Any) -> None:
    """A function for each name that has overloads alone: the first one, whose docstring it is, without types.

    The types say which array comes back for which goes in; nine signatures of them say less than one without.
    """
    for name, overloads in list(owner.overloads.items()):
        if not overloads or name in owner.members:
            continue
        first = overloads[0]
        for parameter in first.parameters:
            parameter.annotation = None
        first.returns = None
        first.overloads = None
        owner.set_member(name, first)


def _markdown(thing: Any, seen: set[str]) -> None:
    if thing.is_alias or thing.path in seen:
        return
    seen.add(thing.path)
    if thing.docstring:
        thing.docstring.value = docstring(thing.docstring.value)
    for member in thing.members.values():
        _markdown(member, seen)


class FlashKernel(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.path != "flashkernel":
            return
        compiled = pkg["_C"]
        _functions(compiled)
        for thing in compiled.classes.values():
            _functions(thing)
        for name, thing in compiled.members.items():
            if not name.startswith("_") and name not in pkg.members and not thing.is_alias:
                thing.parent = pkg  # `flashkernel.attention`, as it is imported
                pkg.members[name] = thing
        pkg.set_member("force", griffe.Alias("force", pkg["ops.force"]))
        _markdown(pkg, set())
