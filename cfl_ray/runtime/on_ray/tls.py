"""Whether a cluster and this process agree on TLS, by one connection: Ray says only that it cannot connect."""

import os
import socket
import ssl
from contextlib import closing

from cfl_ray.errors import ConfigError

SWITCH = "RAY_USE_TLS"
_CERTIFICATE, _KEY, _AUTHORITY = FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_ANSWER_SECONDS = 5.0  # limit for an answer of the cluster
_REFUSAL_SECONDS = 1.0  # for the refusal of our certificate, which follows a handshake of TLS 1.3


def uses_tls() -> bool:
    """Whether Ray uses TLS in this process."""
    return os.environ.get(SWITCH, "0").lower() in ("1", "true")


def check_tls(address: str, host: str, port: int) -> None:
    """Raises ConfigError if the cluster and this process cannot agree on TLS.

    address: as the user gave it. host, port: where Ray connects. A cluster that does not answer, or in another way than
    a TLS peer or Ray would, is left to Ray. Raises OSError without a connection.
    """
    context = own_context()
    with closing(socket.create_connection((host, port), timeout=_ANSWER_SECONDS)) as plain:
        try:
            if context is None:
                _refuse_tls(plain, address)
            else:
                _agree(context, plain, address, host)
        except (TimeoutError, ConnectionError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return


def own_context() -> ssl.SSLContext | None:
    """The certificates of Ray's variables; None without TLS. Raises ConfigError if a file is missing or unusable."""
    if not uses_tls():
        return None
    if missing := [name for name in FILES if not os.environ.get(name)]:
        raise ConfigError(f"{SWITCH} is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not")
    context = _context()
    for name in FILES:
        try:
            open(os.environ[name], "rb").close()
        except OSError as error:
            raise ConfigError(f"{name}={os.environ[name]}: {error.strerror}") from error
    try:
        context.load_verify_locations(os.environ[_AUTHORITY])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_AUTHORITY}={os.environ[_AUTHORITY]} holds no certificate ({_reason(error)})") from error
    try:
        context.load_cert_chain(
            os.environ[_CERTIFICATE], os.environ[_KEY], password=""
        )  # without: asks at the terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_CERTIFICATE}={os.environ[_CERTIFICATE]} and {_KEY}={os.environ[_KEY]} are not a certificate and its "
            f"private key without a password ({_reason(error)})"
        ) from error
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # short keys are Ray's to refuse, not ours
    return context


def _refuse_tls(plain: socket.socket, address: str) -> None:
    """Raises ConfigError if the other side speaks TLS."""
    context = _context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(plain).close()
    except ssl.SSLError as error:
        if not _is_alert(error):  # no TLS either
            return
    raise ConfigError(
        f"the Ray cluster at {address} uses TLS, and this process does not: set {SWITCH}=1, {', '.join(FILES[:2])} "
        f"and {FILES[2]} here, to a certificate that the cluster's authority has signed"
    )


def _agree(context: ssl.SSLContext, plain: socket.socket, address: str, host: str) -> None:
    """Raises ConfigError if the other side has no TLS, or if one side does not take the certificate of the other."""
    refused = (
        f"the Ray cluster at {address} does not take this process's certificate, {_CERTIFICATE}="
        f"{os.environ[_CERTIFICATE]} ({{}}); it must be signed by the authority in the cluster's {_AUTHORITY}"
    )
    try:
        secure = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        advice = f"it must be signed by the authority in {_AUTHORITY}={os.environ[_AUTHORITY]}, and name {host}"
        raise ConfigError(
            f"the TLS certificate of the Ray cluster at {address} is not valid here ({error.verify_message}); {advice}"
        ) from error
    except ssl.SSLError as error:
        if _is_alert(error):
            raise ConfigError(refused.format(_reason(error))) from error
        raise ConfigError(
            f"{SWITCH} is set, and the Ray cluster at {address} does not use TLS: unset {SWITCH} here, or start the "
            f"cluster with {SWITCH}, {', '.join(FILES)}"
        ) from error
    with secure:
        secure.settimeout(_REFUSAL_SECONDS)
        try:
            reason = None if secure.recv(1) else "it closes the connection"  # Ray's server speaks first
        except TimeoutError:
            return
        except OSError as error:  # the answer to a certificate in TLS 1.3: an alert, or none
            reason = _reason(error) if isinstance(error, ssl.SSLError) else "it closes the connection"
    if reason:
        raise ConfigError(refused.format(reason))


def _is_alert(error: ssl.SSLError) -> bool:
    """Whether the other side refused in the words of TLS."""
    return "ALERT" in (error.reason or "")


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
