"""Certificates for the TLS of Ray, made with openssl."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def certificates(folder: Path, *names: str, days: int = 2) -> dict[str, str]:
    """Ray's variables for TLS, with certificates that an authority made for this test has signed.

    names: further addresses of the machine; 127.0.0.1 is one. days: of validity; 0: over.
    """
    addresses = ",".join(f"IP:{name}" for name in ("127.0.0.1", *names))
    (folder / "names").write_text(f"subjectAltName=DNS:localhost,{addresses}\n")
    for command in (
        f"req -x509 {KEY} -keyout ca.key -out ca.crt -days 2 -subj /CN=authority",
        f"req {KEY} -keyout tls.key -out tls.csr -subj /CN=node",
        f"x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out tls.crt -days {days} -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return variables(SERVER_CERT=folder / "tls.crt", SERVER_KEY=folder / "tls.key", CA_CERT=folder / "ca.crt")


def variables(**files: Path) -> dict[str, str]:
    """Ray's variables for TLS with these files, by the ends of their names."""
    return {"RAY_USE_TLS": "1"} | {f"RAY_TLS_{name}": str(file) for name, file in files.items()}


def mixed(own: Mapping[str, str], authority: Mapping[str, str]) -> dict[str, str]:
    """The certificate of one set of variables with the authority of another."""
    return {**own, "RAY_TLS_CA_CERT": authority["RAY_TLS_CA_CERT"]}
