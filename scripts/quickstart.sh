#!/usr/bin/env bash
# Installs FlashKernel into .venv (or the active virtual environment) and generates text with it.
# Arguments go to `flashkernel generate`: bash scripts/quickstart.sh --prompt "def fibonacci(n):" --max-new-tokens 100
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

say "building and installing FlashKernel"
pip_build ".[generate]"
say "flashkernel generate $*"
flashkernel generate "$@"
