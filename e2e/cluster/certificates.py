"""Certificates, keys and kubeconfigs, created once in a directory of the cluster."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

VALID: Final = datetime.timedelta(days=30)
"""Validity of certificates; a cluster runs for hours."""


@dataclass(frozen=True)
class Authority:
    """Certificate authority of a directory with NAME.crt and NAME.key in PEM."""

    directory: Path
    name: str = "ca"

    @property
    def certificate_file(self) -> Path:
        return self.directory / f"{self.name}.crt"

    def create(self) -> Authority:
        self.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not self.certificate_file.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            subject = _subject(self.name, None)
            _write(self.directory, self.name, key, _builder(subject, subject, key, ca=True).sign(key, hashes.SHA256()))
        return self

    def issue(self, name: str, user: str, group: str | None = None, addresses: Sequence[str] = ()) -> None:
        """Issue a certificate for clients and, with addresses (names or IPs), for servers, unless it exists."""
        if (self.directory / f"{name}.crt").exists():
            return
        ca_key = serialization.load_pem_private_key((self.directory / f"{self.name}.key").read_bytes(), None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        ca = x509.load_pem_x509_certificate(self.certificate_file.read_bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(_subject(user, group), ca.subject, key, ca=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        if addresses:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(a) for a in addresses]), critical=False
            )
        _write(self.directory, name, key, builder.sign(ca_key, hashes.SHA256()))

    def kubeconfig(self, path: Path, server: str, name: str, user: str, group: str | None = None) -> None:
        """Write a kubeconfig for a user with the certificate `name`, which is issued if necessary."""
        self.issue(name, user, group)

        def encoded(file: Path) -> str:
            return base64.b64encode(file.read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": encoded(self.certificate_file)}
        credentials = {
            "client-certificate-data": encoded(self.directory / f"{name}.crt"),
            "client-key-data": encoded(self.directory / f"{name}.key"),
        }
        write_if_changed(
            path,
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "minisgl",
                    "clusters": [{"name": "minisgl", "cluster": cluster}],
                    "users": [{"name": user, "user": credentials}],
                    "contexts": [{"name": "minisgl", "context": {"cluster": "minisgl", "user": user}}],
                }
            ),
        )
        path.chmod(0o600)


def signing_key(directory: Path, name: str) -> None:
    """Create NAME.key and NAME.pub for the tokens of service accounts, unless they exist."""
    if not (directory / f"{name}.pub").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        _write(directory, name, key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (directory / f"{name}.pub").write_bytes(public)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file only if its content changes: containerd reads its CNI files after each write, even a partial one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _subject(user: str, group: str | None) -> x509.Name:
    names = [x509.NameAttribute(x509.NameOID.COMMON_NAME, user)]
    if group is not None:
        names.append(x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, group))
    return x509.Name(names)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _write(
    directory: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate | None = None
) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / f"{name}.key").write_bytes(pem)
    (directory / f"{name}.key").chmod(0o600)
    if certificate is not None:
        (directory / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
