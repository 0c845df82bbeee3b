"""With a key configured nothing is believed that no trusted key signed, and it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from herd.storage.artifact import ArtifactSpec, Store, UntrustedArtifact
from herd.storage.digests import SIGNING, TRUSTED, digest_json, sign, signature_error


def artifact_spec(**parameters: object) -> ArtifactSpec:
    return ArtifactSpec("evaluation", "tiny", 1, dict(parameters), {})


def build(store: Store, spec: ArtifactSpec) -> Path:
    with store.staging() as folder:
        (folder / "scores.json").write_text("{}")
        return store.commit(spec, folder, {"eval/bpb": 2.5}, "tiny-1", "abc", 0.1).path


def key(folder: Path, name: str) -> tuple[str, str]:
    """Write a private and a public key; return their paths."""
    secret, private, public = Ed25519PrivateKey.generate(), folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(secret.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return str(private), str(public)


def forge(folder: Path, **changes: object) -> None:
    """Change a manifest and seal it again, as somebody who can write the root may."""
    data = json.loads((folder / "manifest.json").read_text())
    del data["seal"]
    signature = {"signature": data.pop("signature")} if "signature" in data else {}
    data |= changes
    (folder / "manifest.json").write_text(json.dumps({**data, "seal": digest_json(data), **signature}))


def test_without_a_key_nothing_is_signed_or_asked_for(tmp_path: Path) -> None:
    folder = build(Store(tmp_path), artifact_spec())
    assert "signature" not in json.loads((folder / "manifest.json").read_text())
    assert signature_error("manifest", "00", "") == ""


def test_what_one_key_signs_those_believe_who_trust_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (private, public), (other, other_public) = key(tmp_path, "one"), key(tmp_path, "other")
    store = Store(tmp_path / "root")
    monkeypatch.setenv(SIGNING, private)
    build(store, artifact_spec())
    for signing, trusted in ((private, ""), ("", public), (other, f"{other_public}:{public}")):
        monkeypatch.setenv(SIGNING, signing)
        monkeypatch.setenv(TRUSTED, trusted)
        assert store.find(artifact_spec()) is not None
        assert store.load(artifact_spec().label).metadata == {"eval/bpb": 2.5}
    monkeypatch.setenv(SIGNING, other)
    monkeypatch.delenv(TRUSTED)
    label = artifact_spec().label
    with pytest.raises(UntrustedArtifact, match=rf"{label}/manifest.json: is signed by none of the 1 keys"):
        store.load(label)


def test_forged_and_unsigned_manifests_are_refused_by_name_and_left_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = key(tmp_path, "one")
    store = Store(tmp_path / "root")
    old = build(store, artifact_spec(n=1))
    monkeypatch.setenv(SIGNING, private)
    new = build(store, artifact_spec(n=2))
    forge(new, facts={"eval/bpb": 0.1})
    for spec, why in ((artifact_spec(n=1), "is not signed"), (artifact_spec(n=2), "is signed by none of")):
        with pytest.raises(UntrustedArtifact, match=rf"{spec.label}/manifest.json: {why}"):
            store.find(spec, print)
    assert store.all("evaluation") == []
    assert old.is_dir()
    assert not (tmp_path / "root" / ".damaged").exists()
    store.sign(artifact_spec(n=1).label)
    assert store.find(artifact_spec(n=1), print) is not None


def test_a_signature_is_of_one_kind_of_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIGNING, key(tmp_path, "one")[0])
    signature = sign("manifest", "ab")
    assert signature_error("manifest", "ab", signature) == ""
    for what, digest, text in (("promotion", "ab", signature), ("manifest", "cd", signature), ("manifest", "ab", "??")):
        assert "is signed by none of the 1 keys" in signature_error(what, digest, text)


def test_a_key_that_cannot_be_used_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = key(tmp_path, "one")
    other = tmp_path / "x25519.pem"
    other.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    other.chmod(0o600)
    for signing, fault in (
        ("/nowhere", "cannot be used"),
        (public, "others can read it"),
        (str(other), "is not an Ed25519"),
    ):
        monkeypatch.setenv(SIGNING, signing)
        with pytest.raises(ValueError, match=f"{SIGNING}: {signing}: .*{fault}.*openssl genpkey"):
            sign("manifest", "ab")
    monkeypatch.delenv(SIGNING)
    for trusted in ("/nowhere", private):
        monkeypatch.setenv(TRUSTED, trusted)
        with pytest.raises(ValueError, match=f"{TRUSTED}: {trusted}: "):
            signature_error("manifest", "ab", "")
    monkeypatch.setenv(TRUSTED, public)
    with pytest.raises(ValueError, match=f"{SIGNING}: is not set, but {TRUSTED} is"):
        sign("manifest", "ab")
