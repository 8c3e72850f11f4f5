# coat-vlm on the official PyTorch image, whose torch stays as it is. Not built in CI, which has no container engine.
#   docker build -t coat-vlm .
#   docker run --rm -it --gpus all --ipc host -v "$PWD:/data" coat-vlm coat-vlm doctor
# The devel image has the C compiler that Triton needs; another torch: --build-arg IMAGE=pytorch/pytorch:...
ARG IMAGE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel
FROM ${IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
WORKDIR /opt/coat-vlm
COPY pyproject.toml README.md LICENSE ./
COPY coat_vlm coat_vlm
COPY kernels kernels
COPY data data
COPY eval eval
COPY scripts scripts
RUN pip list --format=freeze | grep -E '^(torch|torchvision|triton)==' > /tmp/constraints.txt \
    && pip install -c /tmp/constraints.txt '.[lora]' \
    && rm /tmp/constraints.txt
WORKDIR /data
CMD ["coat-vlm", "doctor"]
