# Millrace without a GPU. From the root of a checkout:
#   docker build -f docker/cpu.Dockerfile -t millrace:cpu --build-arg TORCH_INDEX=URL .
# TORCH_INDEX is PyTorch's package index of CPU builds. Without it, the build with CUDA is installed,
# which works as well and is several GB larger.
#   docker run --rm --shm-size 2g millrace:cpu millrace demo
FROM python:3.12-slim

ARG TORCH_INDEX=
WORKDIR /tmp/build
COPY requirements.txt requirements.lock docker/select_pins.sh ./
# requirements.lock has no torch, because each platform has builds of its own.
RUN grep '^torch==' requirements.txt > torch.txt \
    && pip install --no-cache-dir -r torch.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    && sh select_pins.sh > runtime.lock \
    && pip install --no-cache-dir --no-deps --require-hashes -r runtime.lock

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf /tmp/build \
    && useradd --create-home --uid 1000 millrace

USER 1000
WORKDIR /home/millrace
CMD ["millrace", "--help"]
