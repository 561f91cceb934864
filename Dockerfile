# docker build -t flashkernel . && docker run --gpus all flashkernel        runs all tests (without --gpus all: on the CPU)
# docker run --gpus all flashkernel flashkernel generate --model demo --prompt "def main():"
# Any other Debian or Ubuntu with Python >= 3.10: --build-arg BASE=debian:bookworm (no CUDA there: the CPU alone).
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git libgtest-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /flashkernel
COPY . .
# The environment and the build are in the image, so that a run only tests.
RUN FLASHKERNEL_BUILD_ONLY=1 bash scripts/test.sh
ENV VIRTUAL_ENV=/flashkernel/.venv PATH=/flashkernel/.venv/bin:$PATH
CMD ["bash", "scripts/test.sh"]
