# The learner: its driver, and the Ray nodes that run the roles. Build from the repository's root:
#   docker build -f deploy/docker/learner.Dockerfile -t penstock/learner:0.1.0 .
#   … --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t penstock/learner-cpu:0.1.0 .
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_VERSION=2.13.0
ARG RAY_VERSION=2.60.0
ARG TRANSFORMERS_VERSION=5.19.0
ARG PEFT_VERSION=0.21.0
WORKDIR /src
RUN python -m venv /opt/penstock
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY rollout_server rollout_server
COPY learner learner
COPY services services
COPY tools tools
# KubeRay's probes call the dashboard agent, which only ray[default] installs.
RUN /opt/penstock/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" \
    ".[learner,cuda,objectstore]" "torch==${TORCH_VERSION}" "ray[default]==${RAY_VERSION}" \
    "transformers==${TRANSFORMERS_VERSION}" "peft==${PEFT_VERSION}"
COPY deploy/python/requirements-cuda.txt .
RUN /opt/penstock/bin/pip install --no-cache-dir --no-deps -r requirements-cuda.txt

FROM ${PYTHON}
# KubeRay's probes use wget. The links are needed because KubeRay starts Ray in a login shell, which resets PATH.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home penstock && install -d -o penstock -g penstock /runs \
  && ln -s /opt/penstock/bin/ray /opt/penstock/bin/penstock /usr/local/bin/
COPY --from=build /opt/penstock /opt/penstock
COPY examples/arithmetic /opt/examples/arithmetic
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PENSTOCK_LOG=json
USER 10001
EXPOSE 9100
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9100/healthz', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["learner", "--config", "/etc/penstock/run.yaml"]
