# The image of `batchinfer submit --to k8s`. Build the wheel first:
#   python -m build --wheel && docker build --tag registry.example/team/batchinfer:1 .
# On GPUs take a base with CUDA and the libraries of docs/gpus.md instead: docker build --build-arg BASE=... .
ARG BASE=python:3.11-slim
FROM ${BASE}

# a compiler: the C++ operations are made for the processor that a pod finds
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

COPY dist/*.whl /wheels/
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels

# pods run as the user who owns the run folder, whom this image does not know
ENV HOME=/tmp
USER 1000:1000
ENTRYPOINT ["batchinfer"]
