# Sourced by the other scripts: a virtual environment in .venv with what the system still lacks. Prints what it does.
# Needs Python >= 3.10 and a C++17 compiler; takes missing Debian or Ubuntu packages from apt when it may.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

# apt_install PACKAGE...: as root, or through sudo when that needs no password.
apt_install() {
  command -v apt-get >/dev/null || { echo "please install: $*" >&2; return 1; }
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || { echo "please run: sudo apt-get install $*" >&2; return 1; }
    sudo=(sudo)
  fi
  say "installing Debian packages: $*"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# pip_build ARGUMENT...: pip install (or what pip_command names), showing what CMake has decided and how far the build is, and its end where it fails.
# FLASHKERNEL_CUDA=AUTO|ON|OFF and FLASHKERNEL_CUDA_ARCHITECTURES=AUTO|native|all|list are passed on to CMake: a build folder that
# is used again would keep its own.
pip_build() {
  local log
  log=$(mktemp)
  python -m pip install -q 'pip>=23.1'  # knows -C
  python -m pip "${pip_command:-install}" -v "$@" -C cmake.define.FLASHKERNEL_CUDA="${FLASHKERNEL_CUDA:-AUTO}" \
    -C cmake.define.FLASHKERNEL_CUDA_ARCHITECTURES="${FLASHKERNEL_CUDA_ARCHITECTURES:-AUTO}" 2>&1 | tee "$log" |
    grep -E --line-buffered '^ *(-- flashkernel|\[[0-9]+/[0-9]+\]|Successfully|.*warning:)' |
    sed -u -E 's/^ *//; s/^(.{200}).*/\1/' || { tail -100 "$log"; return 1; }
  rm "$log"
}

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed" >&2; exit 1; }
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || apt_install g++

missing=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" - <<'EOF' || missing+=(python3-dev)
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
EOF
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"

if [ -z "${VIRTUAL_ENV:-}" ]; then
  [ -x .venv/bin/python ] || { say "creating .venv"; "$python" -m venv .venv; }
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi
