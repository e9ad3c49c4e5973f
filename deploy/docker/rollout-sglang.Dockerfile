# The rollout server with SGLang. Build from the repository's root:
#   docker build -f deploy/docker/rollout-sglang.Dockerfile -t penstock/rollout-sglang:0.1.0 .
ARG PYTHON=python:3.11.13-slim-bookworm
ARG SGLANG=lmsysorg/sglang:v0.5.23

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY rollout_server rollout_server
COPY learner learner
COPY services services
COPY tools tools
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# The versions of the engine, torch and transformers stay those of SGLang's image.
FROM ${SGLANG} AS gpu
COPY --from=wheel /wheels /wheels
COPY deploy/python/requirements-cuda.txt /requirements-cuda.txt
# bubblewrap isolates the programs of code rewards where the host allows user namespaces.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python3 -m pip freeze | grep -E '^(torch|torchvision|torchaudio|sglang-kernel|transformers|numpy)==' > /constraints.txt \
  && python3 -m pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[rollout,agents,cuda,objectstore]" \
  && python3 -m pip install --no-cache-dir --no-deps -r /requirements-cuda.txt \
  && rm -rf /wheels \
  && useradd --uid 10001 --create-home penstock && install -d -o penstock -g penstock /runs
ENV PYTHONUNBUFFERED=1 PENSTOCK_LOG=json
USER 10001
EXPOSE 7070 9100
HEALTHCHECK --start-period=1200s --interval=10s --timeout=5s \
  CMD ["python3", "-c", "import socket, urllib.request as r; r.urlopen('http://%s:9100/healthz' % socket.gethostname(), timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["rollout", "--config", "/etc/penstock/run.yaml"]
