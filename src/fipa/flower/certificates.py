"""Certificates and keys for a Flower deployment, without the openssl and ssh-keygen programs.

Flower reads the TLS files as PEM, and the keys that SuperNodes prove themselves with as OpenSSH files.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class ServerFiles(NamedTuple):
    """The files a TLS server needs; clients need the first only."""

    authority: Path
    certificate: Path
    key: Path


def write_server_files(folder: Path, days: int = 7) -> ServerFiles:
    """Make an authority and a certificate of it for localhost and 127.0.0.1.

    The authority's private key is never written: it signs this one certificate, and is forgotten.

    Parameters
    ----------
    folder
        An existing folder; gets ca.crt, server.crt and server.key.
    days
        How long the certificates are valid.

    Returns
    -------
    ServerFiles
        Where the three files are.
    """
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority_name, server_name = _name("fipa demo authority"), _name("localhost")
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id)
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(authority_id, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    addresses = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    server = (
        _builder(server_name, authority_name, server_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(addresses, critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    files = ServerFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    files.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(Encoding.PEM))
    _write_secret(files.key, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def write_node_key(path: Path) -> Path:
    """Make a key pair (ECDSA, P-384) for one SuperNode: the private key in `path`, the public one beside it.

    Parameters
    ----------
    path
        The file of the private key; the public key gets the same name with .pub after it. Neither may exist.

    Returns
    -------
    Path
        The file of the public key.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = path.with_name(path.name + ".pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks in containers may be a little apart
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_secret(path: Path, content: bytes) -> None:
    """Only the owner may read it, from the first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
