"""The provenance that files claim: signed manifests, metadata, hostile files."""

import datetime
import sys
from pathlib import Path
from typing import Any

import pytest

from fvc_lib.tasks.video.verdicts.untrusted import manifest_sentences, provenance_of, read_claims


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, make_video: Any) -> Path:
    """A video signed by a camera of a newsroom that nobody trusts yet."""
    import c2pa

    folder = tmp_path_factory.mktemp("signed")
    source, target = make_video(folder / "plain.mp4", 1), folder / "signed.mp4"
    certificates, key = _signer()
    manifest = {
        "claim_generator_info": [{"name": "test camera", "version": "1"}],
        "assertions": [
            {
                "label": "c2pa.actions",
                "data": {
                    "actions": [
                        {
                            "action": "c2pa.created",
                            "digitalSourceType": "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia",
                        }
                    ]
                },
            }
        ],
    }
    info = c2pa.C2paSignerInfo(alg=b"es256", sign_cert=certificates, private_key=key, ta_url=None)
    with (
        c2pa.Signer.from_info(info) as signer, c2pa.Builder(manifest) as builder,
        source.open("rb") as read, target.open("w+b") as written,
    ):  # fmt: skip
        builder.sign(signer, "video/mp4", read, written)
    return target


def _signer() -> tuple[bytes, bytes]:
    """A certificate with that of who made it, and its key, PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    above, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)

    def named(text: str) -> x509.Name:
        parts = ((NameOID.ORGANIZATION_NAME, "Test Newsroom"), (NameOID.COMMON_NAME, text))
        return x509.Name([x509.NameAttribute(*part) for part in parts])

    def made(name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only"), False,
        )  # fmt: skip
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=100))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, **usage
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(above.public_key()), critical=False)
        )  # fmt: skip
        if not is_authority:
            builder = builder.add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION]), critical=False
            )
        return builder.sign(above, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    plain = serialization.NoEncryption()
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return made("camera 1", own, is_authority=False) + made("authority", above, is_authority=True), key


@pytest.mark.app
def test_claims_are_repeated_only_where_the_signature_holds(signed, tmp_path):
    found = provenance_of(signed)
    assert found[0] == "The file has a manifest (C2PA) signed by camera 1, Test Newsroom."
    assert "No list of trusted signers is used" in found[1]
    assert found[2:] == ("It claims: created (made by a generative model).",)

    content = bytearray(signed.read_bytes())
    content[content.rindex(b"mdat") + 100] ^= 0xFF
    changed = tmp_path / "changed.mp4"
    changed.write_bytes(content)
    signer, why = provenance_of(changed)
    assert signer == found[0]
    assert "does not hold" in why


@pytest.mark.app
def test_a_file_without_a_manifest_and_one_that_is_no_video_say_so(make_video, tmp_path):
    (found,) = provenance_of(make_video(tmp_path / "a.mp4", 1))
    assert found.startswith("The file has no signed manifest")
    text = tmp_path / "notes.txt"
    text.write_text("no video")
    assert "signed by" not in provenance_of(text)[0]


@pytest.mark.parametrize(
    "store",
    [
        {"validation_state": "Invalid", "active_manifest": "x",
         "manifests": {"x": {"assertions": [{}], "ingredients": [{}]}}},
        {"validation_state": "Valid", "active_manifest": "x",
         "manifests": {"x": {"assertions": [{"label": "c2pa.actions"}]}},
         "validation_results": {"activeManifest": {"failure": [{"code": "assertion.bmffHash.mismatch"}]}}},
    ],
)  # fmt: skip
def test_a_manifest_with_missing_parts_makes_no_claim_that_its_state_does_not_allow(store):
    assert len(list(manifest_sentences(store))) == 2


def test_without_the_library_it_is_named(monkeypatch, make_video, tmp_path):
    monkeypatch.setitem(sys.modules, "c2pa", None)
    (problem,) = read_claims(str(make_video(tmp_path / "a.mp4", 1)))
    assert "c2pa-python" in problem
