"""Certificates by openssl, as an operator would make them."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str, authority: str = "") -> tuple[Path, Path]:
    """Make `NAME.crt` and `NAME.key`, for 127.0.0.1 and the processes of a run, signed by another one or by itself."""
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:penstock"]
    signed = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"] if authority else []
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command = ["openssl", *new, "-keyout", f"{name}.key", "-out", f"{name}.crt", *subject, *signed]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=100)
    return folder / f"{name}.crt", folder / f"{name}.key"
