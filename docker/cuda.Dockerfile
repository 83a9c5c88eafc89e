# Millrace for NVIDIA GPUs. The host needs a driver for the CUDA version of this PyTorch, and the
# NVIDIA container toolkit. From the root of a checkout:
#   docker build -f docker/cuda.Dockerfile -t millrace:cuda .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD":/work -w /work millrace:cuda \
#     millrace train run.toml
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler when a kernel is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /tmp/build
COPY requirements.txt requirements.lock docker/select_pins.sh ./
# torch from PyPI brings Triton and the CUDA libraries, and pins their versions itself.
RUN grep '^torch==' requirements.txt > torch.txt \
    && pip install --no-cache-dir -r torch.txt \
    && sh select_pins.sh > runtime.lock \
    && pip install --no-cache-dir --no-deps --require-hashes -r runtime.lock

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf /tmp/build \
    && useradd --create-home --uid 1000 millrace

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/millrace
CMD ["millrace", "--help"]
