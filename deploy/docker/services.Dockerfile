# The gateway, and the `penstock` client commands. Build from the repository's root:
#   docker build -f deploy/docker/services.Dockerfile -t penstock/services:0.1.0 .
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
RUN python -m venv /opt/penstock
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY rollout_server rollout_server
COPY learner learner
COPY services services
COPY tools tools
RUN /opt/penstock/bin/pip install --no-cache-dir ".[services,objectstore]"

FROM ${PYTHON}
RUN useradd --uid 10001 --create-home penstock && install -d -o penstock -g penstock /runs
COPY --from=build /opt/penstock /opt/penstock
COPY examples/arithmetic /opt/examples/arithmetic
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PENSTOCK_LOG=json
USER 10001
EXPOSE 8080 9090
HEALTHCHECK --start-period=30s --interval=10s --timeout=5s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["gateway", "--config", "/etc/penstock/run.yaml"]
