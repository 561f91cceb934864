#!/usr/bin/env bash
# Builds the documentation as a site into build/site; a link or an anchor to nothing is an error.
# The reference needs the compiled module's stub: the package that PYTHONPATH or the environment has, else it is built for the CPU.
# Arguments are passed on to MkDocs instead of "build": `bash scripts/docs.sh serve` shows the site while it is written.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

say "installing what the site needs"
python -m pip install -q 'pip>=25.1'  # knows --group
python -m pip install -q --group docs
python -c 'import flashkernel' 2>/dev/null || { say "building the package"; FLASHKERNEL_CUDA=${FLASHKERNEL_CUDA:-OFF} pip_build .; }

say "building the site"
export NO_MKDOCS_2_WARNING=1  # the group keeps MkDocs below 2
if [ $# = 0 ]; then set -- build --strict; fi
python -m mkdocs "$@"
