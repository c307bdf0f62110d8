"""Certificates that TLS accepts for loopback and for nothing else; keys in the formats Flower reads."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fipa.flower.certificates import ServerFiles, write_node_key, write_server_files


def handshake(files: ServerFiles, trusted: Path, host: str) -> None:
    """Connect a client that trusts `trusted` to a server with `files`, in the strictest mode there is."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=str(trusted))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(far, server_side=True).close()
        except OSError:  # the client has refused; it says why
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(near, server_hostname=host).close()
    finally:
        near.close()
        thread.join()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_tls_accepts_the_certificate_for_loopback(tmp_path: Path, host: str) -> None:
    files = write_server_files(tmp_path)
    handshake(files, files.authority, host)


def test_tls_refuses_another_host_and_another_authority(tmp_path: Path) -> None:
    files = write_server_files(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"10\.0\.0\.1"):
        handshake(files, files.authority, "10.0.0.1")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, write_server_files(other).authority, "localhost")


def test_no_key_of_the_authority_is_left_and_others_cannot_read_the_server_key(tmp_path: Path) -> None:
    files = write_server_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ca.crt", "server.crt", "server.key"}
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert b"PRIVATE KEY" not in files.authority.read_bytes() + files.certificate.read_bytes()


def test_the_key_of_a_node_is_a_pair_in_openssh_format_on_the_curve_flower_wants(tmp_path: Path) -> None:
    public = write_node_key(tmp_path / "node-0")
    assert public == tmp_path / "node-0.pub"
    assert stat.S_IMODE((tmp_path / "node-0").stat().st_mode) == 0o600
    key = load_ssh_private_key((tmp_path / "node-0").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert load_ssh_public_key(public.read_bytes()) == key.public_key()


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    write_node_key(tmp_path / "node-0")
    before = (tmp_path / "node-0").read_bytes()
    with pytest.raises(FileExistsError):
        write_node_key(tmp_path / "node-0")
    assert (tmp_path / "node-0").read_bytes() == before
