# Pensieve as an image. On a CPU:
#   docker build -t pensieve .
#   docker run --rm -v "$PWD/outputs:/outputs" pensieve
# On a GPU (with NVIDIA's container toolkit; PyTorch brings CUDA's libraries):
#   docker build -t pensieve:cuda --build-arg TORCH=cu130 .
#   docker run --rm --gpus all -v "$PWD/outputs:/outputs" pensieve:cuda run model=llama3_8b cache=small -m
FROM python:3.12-slim AS wheel
RUN pip install --no-cache-dir uv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pensieve pensieve
COPY conf conf
COPY analysis analysis
RUN uv build --wheel --out-dir /dist

FROM python:3.12-slim
# A C compiler: decoding on a CPU and Triton's kernels are compiled on the machine that runs them.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH=cpu
COPY constraints.txt /tmp/
RUN --mount=from=wheel,source=/dist,target=/dist --mount=from=wheel,source=/usr/local/bin/uv,target=/usr/local/bin/uv \
    uv pip install --system --no-cache --torch-backend "$TORCH" -c /tmp/constraints.txt "$(echo /dist/*.whl)[serve,gguf]"
ENV PENSIEVE_OUTPUTS=/outputs NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /outputs
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["pensieve"]
CMD ["demo"]
