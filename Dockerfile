# docker build -t lingpt . && docker run --rm -v "$PWD/runs:/lingpt/runs" lingpt make train
#
# For a GPU, PyTorch's wheels bring the CUDA runtime; the host needs the driver and NVIDIA's container toolkit alone:
#   docker build -t lingpt --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg GPU_EXTRAS=,cuda13 .
#   docker run --rm --gpus all -v "$PWD/runs:/lingpt/runs" lingpt make train
FROM python:3.12-slim

# make, and the C compiler that torch.compile calls
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*

WORKDIR /lingpt
COPY . .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG GPU_EXTRAS=
RUN make .venv/.train-installed TORCH_INDEX="$TORCH_INDEX" GPU_EXTRAS="$GPU_EXTRAS" PIP_NO_CACHE_DIR=1

CMD ["make", "train"]
