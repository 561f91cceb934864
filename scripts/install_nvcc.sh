#!/usr/bin/env bash
# Puts CUDA's compiler, headers and static runtime, which NVIDIA publishes on PyPI, into a folder as a toolkit has them:
#   bash scripts/install_nvcc.sh /opt/nvcc && CUDACXX=/opt/nvcc/bin/nvcc FLASHKERNEL_CUDA=ON pip install .
# For systems without a toolkit: the containers that wheels are built in. 300 MB.
set -euo pipefail
folder=${1:?install_nvcc.sh FOLDER}
"${PYTHON:-python3}" -m pip install -q --no-deps --target "$folder/python" nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
mv "$folder"/python/nvidia/cu13/* "$folder"
rm -r "$folder/python"
ln -s lib "$folder/lib64"  # where nvcc looks for what it links
ln -s libcudart.so.13 "$folder/lib/libcudart.so"  # by which CMake knows a toolkit; the wheel links the static one
chmod +x "$folder"/bin/* "$folder"/nvvm/bin/*
"$folder/bin/nvcc" --version
