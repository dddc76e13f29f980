# Zerobook on NVIDIA GPUs: an image with CUDA's compiler, which DeepSpeed's offload ops and flash-attn need.
# Status: written from the documentation of its parts; not built here.
#
#   docker build -t zerobook .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v zerobook-cache:/root/.cache -v "$PWD/data:/data" \
#     -v "$PWD/outputs:/zerobook/outputs" -it zerobook
# The first volume keeps downloaded models and prepared data for the next container. -e HF_TOKEN is for gated models. Files in outputs
# belong to root: sudo chown -R "$USER" outputs gives them to you.
# The CUDA version of the image is that of PyPI's torch (requirements-gpu.txt): compilers of another major version are refused.
# The driver of the host has to be 580 or newer (docs.nvidia.com/deploy/cuda-compatibility, CUDA 13.x).
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git libaio-dev make ninja-build python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /zerobook
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN python3 -m venv "$VIRTUAL_ENV"

# torch built for CUDA comes first, and by itself: the other packages take the torch that is there
COPY requirements.txt ./
RUN pip install --no-cache-dir "$(grep -oE '^torch==[0-9.]+' requirements.txt)" \
 && pip install --no-cache-dir -r requirements.txt nvidia-ml-py

COPY . .
RUN pip install --no-cache-dir --no-deps -e .
CMD ["bash"]
