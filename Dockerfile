# herd for processors; for NVIDIA GPUs: docker build --build-arg TORCH_INDEX=https://pypi.org/simple -t herd:cuda .
# See docs/tutorials/containers.md.
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# Triton builds its launcher with a C compiler, on a GPU
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements.txt constraints.txt /tmp/
# torch comes alone from its index, which is asked for nothing else
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement /tmp/requirements.txt \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' /tmp/constraints.txt)" \
    && rm /tmp/requirements.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl && rm -r /tmp/wheels \
    && useradd --create-home --uid 1000 herd
USER herd
WORKDIR /home/herd
# a volume whose folder is not in the image belongs to root
RUN mkdir data
# programs that a model writes run without network and files; a job's ranks share memory: docker run --shm-size 8g
ENV HERD_ROOT=/home/herd/data
VOLUME /home/herd/data
ENTRYPOINT ["herd"]
CMD ["--help"]
