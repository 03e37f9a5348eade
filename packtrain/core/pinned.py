"""One key and one self-signed certificate for all processes of a run, pinned on both sides: who has the file belongs.

TLS 1.3 both ways. Neither side believes any authority, host name or clock: the other must show exactly this certificate
and prove that it has its key. The file is as secret as the run; it travels by whatever channel started the process.
"""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime

from packtrain.core.platform import Platform

KEY_FILE = "run.pem"
"""Its name, in the home of each agent and beside the file of peers."""
FIRST_DAY, LAST_DAY = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""Valid at any time: clocks of machines may be wrong by years, and the file lives as long as the run."""


def make_pinned(platform: Platform, path: str) -> None:
    """Write a new key with its certificate to `path`, for this user alone. FileExistsError where there is one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "packtrain run")])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(FIRST_DAY).not_valid_after(LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    platform.write_new(path, private + certificate.public_bytes(serialization.Encoding.PEM), mode=0o600)


class Pinned:
    """What the file says, ready to wrap sockets. Raises OSError (ssl.SSLError is one) where it is none."""

    def __init__(self, path: str) -> None:
        self._contexts = {
            server_side: _context(path, ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
            for server_side in (False, True)
        }
        (self._certificate,) = self._contexts[True].get_ca_certs(binary_form=True)

    def wrap(self, sock: socket.socket, server_side: bool) -> socket.socket:
        """The same connection, encrypted, once both have shown who they are; within the time-out of `sock`.

        Raises OSError for a stranger, and closes the connection.
        """
        secure = self._contexts[server_side].wrap_socket(sock, server_side, do_handshake_on_connect=False)
        try:
            secure.do_handshake()
            if secure.getpeercert(binary_form=True) != self._certificate:
                raise ssl.SSLError("the other side has another certificate")
        except OSError:
            secure.close()
            raise
        return secure


def _context(path: str, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # addresses change with every restart; the certificate does not
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(path)
    context.load_verify_locations(path)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody comes back without showing the certificate again
    return context
